from __future__ import annotations

from dataclasses import replace

from fake_backend import ByteTokens, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import ImageSpan, Prompt, Request
from llm.sampling.sampler import SamplerState
from llm.scheduling.blocks import BlockPool, ImageTouch
from llm.scheduling.prefix import NoPrefixCache, PrefixCache, block_key, image_touches, root_key
from llm.scheduling.sequence import Group, Sequence
from llm.text.outputs import TextStream

ROOT = root_key("")


def group_of(request: Request) -> Group:
    sampler = SamplerState(request.params, request.prompt.token_ids, 32, 0)
    seq = Sequence(0, list(request.prompt.token_ids), sampler, TextStream(ByteTokens(), request.params))
    return Group(request, seq, (0.0, 0), 0.0)


def keys(prompt: Prompt, namespace: str = "", size: int = 4) -> list[bytes]:
    group = group_of(replace(request_of("r", prompt), namespace=namespace))
    cache = PrefixCache(BlockPool(64, size))
    cache.match(group, group.members[0], 64)
    return [block.key for block in group.members[0].contents]


def computed(cache: PrefixCache, pool: BlockPool, group: Group) -> list[int]:
    """Plays the engine: all blocks allocated, written and published."""
    seq = group.members[0]
    seq.table = pool.allocate(pool.blocks_for(len(seq.tokens)))
    seq.num_computed = len(seq.tokens)
    cache.publish(group, seq)
    return seq.table


def test_a_key_depends_on_parent_tokens_and_images() -> None:
    image = ImageTouch(image_key("A"), 0, 0, 2)
    variants = [
        block_key(ROOT, (1, 2), ()),
        block_key(root_key("tenant"), (1, 2), ()),
        block_key(ROOT, (1, 3), ()),
        block_key(ROOT, (1, 2, 0), ()),
        block_key(ROOT, (1, 2), (image,)),
        block_key(ROOT, (1, 2), (image._replace(key=image_key("B")),)),
        block_key(ROOT, (1, 2), (image._replace(row=1),)),
        block_key(ROOT, (1, 2), (image._replace(at=1),)),
        block_key(ROOT, (1, 2), (image._replace(length=1),)),
    ]
    assert len(set(variants)) == len(variants) and {len(key) for key in variants} == {32}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 20), st.integers(0, 9))
def test_every_block_that_an_image_touches_names_it_with_its_offset(
    before: int, length: int, after: int
) -> None:
    """C2: the full key and the row, in each block of the span, not once over the span."""
    one, other = (keys(prompt_of([1] * before, (name, length), [2] * after)) for name in "AB")
    for index, (first, second) in enumerate(zip(one, other, strict=True)):
        assert (first == second) == ((index + 1) * 4 <= before)
    rows = [
        (touch.at + start, touch.row + i)
        for start in range(0, before + length + after, 4)
        for touch in image_touches((ImageSpan(before, length, image_key("A"), 0),), start, start + 4)
        for i in range(touch.length)
    ]
    assert [row for _, row in rows] == list(range(length))


def test_image_offset_is_part_of_the_key() -> None:
    span = ImageSpan(0, 4, image_key("A"), 0)
    assert keys(Prompt((9,) * 4, (span,))) != keys(Prompt((9,) * 4, (replace(span, offset=4),)))


def test_equal_prompts_in_other_namespaces_share_nothing() -> None:
    prompt = prompt_of([1] * 9)
    assert not set(keys(prompt, "one")) & set(keys(prompt, "two"))


def test_only_written_blocks_are_found() -> None:
    pool = BlockPool(16, 4)
    cache = PrefixCache(pool)
    first, second = (
        group_of(request_of("a", prompt_of([1] * 12))),
        group_of(request_of("b", prompt_of([1] * 12))),
    )
    seq = first.members[0]
    seq.table = pool.allocate(3)
    seq.num_computed = 7
    cache.publish(first, seq)
    assert cache.match(second, second.members[0], 3) == seq.table[:1]
    seq.num_computed = 12
    cache.publish(first, seq)
    assert cache.match(second, second.members[0], 3) == seq.table
    assert cache.match(second, second.members[0], 2) == seq.table[:2]


def test_a_claim_ends_when_published_or_given_up() -> None:
    pool = BlockPool(16, 4)
    cache = PrefixCache(pool)
    first, second = (
        group_of(request_of("a", prompt_of([1] * 9))),
        group_of(request_of("b", prompt_of([1] * 9))),
    )
    for group in (first, second):
        cache.match(group, group.members[0], 2)
    cache.claim(first, first.members[0], 0, 2)
    key = cache.next_key(second.members[0], 0, 2)
    assert key is not None and cache.owner(key) is first
    cache.disclaim(first)
    assert cache.owner(key) is None and cache.num_claims == 0
    cache.claim(second, second.members[0], 0, 2)
    computed(cache, pool, second)
    assert cache.owner(key) is None and cache.num_claims == 0


def test_generated_tokens_are_found_in_the_next_turn() -> None:
    pool = BlockPool(16, 4)
    cache = PrefixCache(pool)
    group = group_of(request_of("a", prompt_of([1] * 6)))
    group.members[0].tokens += [7, 8, 9]
    table = computed(cache, pool, group)
    turn = group_of(request_of("b", prompt_of([1] * 6 + [7, 8, 9, 3])))
    assert cache.match(turn, turn.members[0], 2) == table[:2]


def test_switched_off_nothing_is_found_or_published() -> None:
    pool = BlockPool(16, 4)
    cache = NoPrefixCache()
    group = group_of(request_of("a", prompt_of([1] * 9)))
    seq = group.members[0]
    seq.table = pool.allocate(3)
    seq.num_computed = 9
    cache.publish(group, seq)
    pool.release(seq.table)
    assert cache.match(group, seq, 3) == [] and pool.num_cached == 0
