"""Whose blocks are taken for an interactive request, and how many that frees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import Harness, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.scheduling.blocks import BlockContent, BlockKey, BlockPool
from llm.scheduling.preempt import Preemption


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_num_exclusive_is_what_a_release_frees(data: st.DataObject) -> None:
    """Groups share prefix blocks with others and, forked, among their members; `kept` are the hits of the
    request that would start, which holds them by then."""
    pool = BlockPool(16, 2)
    shared = pool.allocate(4)
    groups: list[Any] = []
    for _ in range(data.draw(st.integers(1, 3))):
        prefix = shared[: data.draw(st.integers(0, 4))]
        own = pool.allocate(data.draw(st.integers(0, 2)))
        members = []
        for _ in range(data.draw(st.integers(1, 2))):
            table = [*prefix, *own]
            pool.retain(table)
            members.append(SimpleNamespace(table=table))
        pool.release(own)
        groups.append(SimpleNamespace(members=members))
    for number, block in enumerate(shared):
        if data.draw(st.booleans()):
            pool.publish(block, BlockContent(BlockKey(number.to_bytes(32, "big")), (number,), ()))
    pool.release(shared)
    kept = shared[: data.draw(st.integers(0, 4))]
    kept = [block for block in kept if pool.refs[block]]
    group = data.draw(st.sampled_from(groups))
    promised = Preemption(None, pool, *[None] * 6).num_exclusive(group, kept)  # type: ignore[arg-type]
    pool.retain(kept)
    before = pool.num_available
    for member in group.members:
        pool.release(member.table)
    assert pool.num_available - before == promised


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_batch_work_that_shares_its_prefix_is_taken_together_or_not_at_all(preemption: Any) -> None:
    """Two batch requests with one image's prefix: taking the later one frees its tail only."""
    harness = Harness(num_blocks=14, block_size=2, max_running=4, preemption=preemption)
    prefix = [7] * 12
    for i in range(2):
        harness.submit(request_of(f"b{i}", prompt_of([*prefix, i]), "batch", max_tokens=6))
        for _ in range(2):
            harness.step()
    harness.submit(request_of("now", prompt_of([9] * 16), max_tokens=4))
    harness.run()
    harness.assert_clean()
    assert {name for name, _ in harness.answers} == {"b0", "b1", "now"}


def waits_for_its_image(priority: Any, **options: Any) -> Harness:
    """`early` was submitted first and waits for image A; then come the others, which run."""
    harness = Harness(encodes=False, block_size=2, preemption="recompute", **options)
    harness.submit(request_of("early", prompt_of([1], ("A", 5), [2] * 10), priority, max_tokens=4))
    return harness


def test_an_interactive_request_is_never_preempted_for_another() -> None:
    """What batch work holds is too little: then nobody gives way, not even the later interactive one."""
    harness = waits_for_its_image("interactive", num_blocks=14, max_running=4)
    harness.submit(request_of("late", prompt_of([3] * 10), max_tokens=8))
    harness.submit(request_of("batch", prompt_of([4] * 3), "batch", max_tokens=8))
    for _ in range(2):
        harness.step()
    harness.encode(image_key("A"))
    harness.step()
    stats = harness.engine.stats()
    assert stats.preempted_recompute == 0 and ("early", 0) not in harness.answers
    harness.run()
    harness.assert_clean()


def test_batch_work_never_preempts_batch_work_to_start() -> None:
    harness = waits_for_its_image("batch", num_blocks=14, max_running=4)
    harness.submit(request_of("later", prompt_of([3] * 12), "batch", max_tokens=8))
    for _ in range(2):
        harness.step()
    harness.encode(image_key("A"))
    harness.run()
    assert harness.engine.stats().preempted_recompute == 0
