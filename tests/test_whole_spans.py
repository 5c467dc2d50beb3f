"""Image spans whose positions see each other: never cut, never starved, cached right."""

from __future__ import annotations

import pytest
from fake_backend import Harness, greedy, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Delta, Prompt

quick = settings(deadline=None, max_examples=60)
parts = st.lists(
    st.one_of(
        st.lists(st.integers(0, 25), min_size=1, max_size=9),
        st.tuples(st.sampled_from("abc"), st.integers(1, 14)),
    ),
    min_size=1,
    max_size=5,
)


def as_prompt(chosen: list[list[int] | tuple[str, int]]) -> Prompt:
    """An image's name says how many rows it has: one name is one image."""
    sized = [(f"{part[0]}{part[1]}", part[1]) if isinstance(part, tuple) else part for part in chosen]
    return prompt_of(*sized, [1])


@quick
@given(st.lists(parts, min_size=1, max_size=5), st.sampled_from([1, 3, 8, 64]), st.integers(0, 3))
def test_answers_are_those_of_whole_prompts_in_any_chunks_and_company(
    chosen: list[list[list[int] | tuple[str, int]]], budget: int, wait: int
) -> None:
    """Prefix hits that end inside a span among them: prompts share images and beginnings."""
    harness = Harness(num_blocks=400, max_step_tokens=budget, max_running=3, whole_spans=True)
    prompts = [as_prompt(one) for one in chosen]
    for index, prompt in enumerate([*prompts, *prompts]):
        harness.submit(request_of(f"r{index}", prompt, max_tokens=4))
        for _ in range(wait):
            harness.step()
    harness.run()
    for index, prompt in enumerate([*prompts, *prompts]):
        assert harness.answer(f"r{index}").token_ids == greedy(prompt, 4, whole_spans=True)
    harness.assert_clean()


@quick
@given(parts, st.sampled_from([1, 4, 9]))
def test_no_chunk_ends_inside_a_span_and_a_step_is_bounded(
    chosen: list[list[int] | tuple[str, int]], budget: int
) -> None:
    harness = Harness(num_blocks=400, max_step_tokens=budget, whole_spans=True)
    prompt = as_prompt(chosen)
    harness.submit(request_of("r", prompt, max_tokens=2))
    harness.run()
    longest = max((span.length for span in prompt.spans), default=0)
    for plan in harness.backend.plans:
        assert plan.num_tokens <= max(budget, longest)
        for item in plan.items:
            end = item.start + len(item.token_ids)
            assert not any(s.start < end < s.start + s.length for s in prompt.spans)


@quick
@given(st.lists(parts, min_size=2, max_size=5), st.sampled_from([2, 4, 9]))
def test_prompts_of_a_step_exceed_its_budget_by_no_more_than_one_span_would(
    chosen: list[list[list[int] | tuple[str, int]]], budget: int
) -> None:
    """The rest of a prompt and then another one's span: the span waits for the next step."""
    harness = Harness(num_blocks=400, max_step_tokens=budget, whole_spans=True)
    prompts = [as_prompt(one) for one in chosen]
    for index, prompt in enumerate(prompts):
        harness.submit(request_of(f"r{index}", prompt, max_tokens=1))
    harness.run()
    longest = max((span.length for prompt in prompts for span in prompt.spans), default=0)
    for plan in harness.backend.plans:
        chunks = [item for item in plan.items if (len(item.token_ids), item.num_logits) != (1, 1)]
        assert sum(len(item.token_ids) for item in chunks) <= max(budget, longest)
    harness.assert_clean()


def test_a_hit_that_ends_inside_a_span_computes_the_rest_of_it_in_one_chunk() -> None:
    """Blocks of 4 and a span of 11: the second request finds the first blocks of the span in the cache, and
    the places of the span in its chunk count from the prompt's start, not from the first uncached one."""
    harness = Harness(num_blocks=64, max_step_tokens=64, whole_spans=True)
    first = prompt_of([5, 6], ("a", 11), [7])
    second = prompt_of([5, 6], ("a", 11), [8, 9])
    harness.submit(request_of("one", first, max_tokens=1))
    harness.run()
    cut = len(harness.backend.plans)
    harness.submit(request_of("two", second, max_tokens=3))
    harness.run()
    item = harness.backend.plans[cut].items[0]
    assert item.start == 12 and item.whole == ((2, 13),)  # the span began before the chunk
    assert harness.answer("two").token_ids == greedy(second, 3, whole_spans=True)


def test_a_long_visual_prefix_is_many_blocks_not_one() -> None:
    """A span is computed whole, but held, found and evicted block by block."""
    harness = Harness(num_blocks=64, block_size=4, max_step_tokens=64, whole_spans=True)
    harness.submit(request_of("one", prompt_of(("a", 40), [1]), max_tokens=1))
    harness.run()
    harness.submit(request_of("two", prompt_of(("a", 40), [2]), max_tokens=1))
    harness.run()
    assert harness.finished["two"].usage is not None and harness.finished["two"].usage.cached_tokens == 40


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_span_beside_decodes_is_neither_starved_nor_waits_for_quiet(budget: int) -> None:
    """Four streams decode all along; the span needs more than a step's budget and is in the next step but
    one at the latest, and every stream has its token in every step."""
    harness = Harness(num_blocks=400, max_step_tokens=budget, max_running=6, whole_spans=True)
    for index in range(4):
        harness.submit(request_of(f"s{index}", prompt_of([index] * 3), max_tokens=60))
    while sum(answer.reason is None for answer in harness.answers.values()) < 4:
        harness.step()
    harness.submit(request_of("image", prompt_of(("a", 30), [3]), max_tokens=2))
    for _ in range(3):
        served = {event.request_id for event in harness.step() if isinstance(event, Delta)}
        assert {f"s{index}" for index in range(4)} <= served
        if any(item.whole for item in harness.backend.plans[-1].items):
            break
    else:
        raise AssertionError("the span waits for quiet")
    harness.run()
    assert harness.answer("image").token_ids == greedy(prompt_of(("a", 30), [3]), 2, whole_spans=True)


@quick
@given(st.lists(parts, min_size=2, max_size=6), st.integers(12, 30), st.booleans())
def test_a_span_survives_preemption_and_swapping_inside_the_prompt(
    chosen: list[list[list[int] | tuple[str, int]]], num_blocks: int, swaps: bool
) -> None:
    harness = Harness(
        num_blocks=max(num_blocks, 30),
        max_step_tokens=6,
        max_running=4,
        whole_spans=True,
        swap_rule=(lambda tokens, blocks: swaps),
    )
    prompts = [as_prompt(one) for one in chosen]
    prompts = [p for p in prompts if -(-(p.num_tokens + 12) // 4) <= harness.backend.num_blocks]
    for index, prompt in enumerate(prompts):
        harness.submit(request_of(f"r{index}", prompt, max_tokens=12))
    harness.run()
    for index, prompt in enumerate(prompts):
        assert harness.answer(f"r{index}").token_ids == greedy(prompt, 12, whole_spans=True)
    harness.assert_clean()


def test_a_span_whose_visual_tokens_are_not_there_holds_nobody_up() -> None:
    harness = Harness(num_blocks=100, max_step_tokens=16, encodes=False, whole_spans=True)
    harness.submit(request_of("image", prompt_of([1, 2], ("a", 9), [3]), max_tokens=2))
    harness.submit(request_of("text", prompt_of([4, 5]), max_tokens=5))
    for _ in range(12):
        harness.step()
    assert harness.answer("text").reason == "length"
    harness.encode(image_key("a"))
    harness.run()
    assert harness.answer("image").reason == "length"
