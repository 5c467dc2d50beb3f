from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.scheduling.blocks import BlockContent, BlockKey, BlockPool


def content(name: int, token: int | None = None) -> BlockContent:
    return BlockContent(BlockKey(name.to_bytes(32, "big")), (name if token is None else token,), ())


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 2)
    first = pool.allocate(2)
    pool.publish(first[0], content(1))
    pool.release(first)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.allocate(3)
    assert pool.find(content(1)) == first[0] and pool.num_evictions == 0
    assert pool.allocate(1) == [first[0]]
    assert pool.find(content(1)) is None and pool.num_evictions == 1


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(3, 2)
    chain = pool.allocate(3)
    for index, block in enumerate(chain):
        pool.publish(block, content(index))
    pool.release(chain)
    assert [pool.allocate(1)[0] for _ in chain] == chain[::-1]


def test_the_least_recently_released_chain_is_evicted_first() -> None:
    pool = BlockPool(2, 2)
    old, young = pool.allocate(1), pool.allocate(1)
    pool.publish(old[0], content(1))
    pool.publish(young[0], content(2))
    pool.release(old)
    pool.release(young)
    pool.retain(old)  # a hit makes it young again
    pool.release(old)
    assert pool.allocate(1) == young


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2, 2)
    kept = pool.allocate(1)
    pool.publish(kept[0], content(1))
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.allocate(1)
    assert pool.find(content(1)) == kept[0]


def test_a_key_collision_with_other_tokens_is_no_hit() -> None:
    pool = BlockPool(2, 1)
    block = pool.allocate(1)
    pool.publish(block[0], content(7, token=1))
    assert pool.find(content(7, token=1)) == block[0]
    assert pool.find(content(7, token=2)) is None


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2, 1)
    first, second = pool.allocate(2)
    pool.publish(first, content(1))
    pool.publish(second, content(1))
    pool.release([first, second])
    assert pool.find(content(1)) == first and (pool.num_free, pool.num_cached) == (1, 1)


def test_clearing_keeps_held_blocks_and_frees_cached_ones() -> None:
    pool = BlockPool(3, 1)
    held, cached = pool.allocate(1), pool.allocate(1)
    pool.publish(held[0], content(1))
    pool.publish(cached[0], content(2))
    pool.release(cached)
    assert pool.clear_cached() == 1
    assert pool.find(content(1)) is None and pool.find(content(2)) is None
    pool.check_integrity([held])
    pool.release(held)
    assert pool.num_free == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_free_held_and_cached_sum_to_the_total_in_every_history(size: int, data: st.DataObject) -> None:
    pool = BlockPool(size, 1)
    tables: list[list[int]] = []
    for step in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["allocate", "fork", "publish", "release", "find"]))
        if action == "allocate" and pool.num_available:
            tables.append(pool.allocate(data.draw(st.integers(1, pool.num_available))))
        elif action == "find":
            block = pool.find(content(data.draw(st.integers(0, 5))))
            if block is not None:
                pool.retain([block])
                tables.append([block])
        elif tables:
            table = tables[data.draw(st.integers(0, len(tables) - 1))]
            if action == "fork":
                pool.retain(table)
                tables.append(list(table))
            elif action == "publish":
                pool.publish(table[step % len(table)], content(data.draw(st.integers(0, 5))))
            else:
                tables.remove(table)
                pool.release(table)
        pool.check_integrity(tables)
        assert pool.num_free + pool.num_held + pool.num_cached == size
    for table in tables:
        pool.release(table)
    assert pool.num_held == 0 and not any(pool.refs)
