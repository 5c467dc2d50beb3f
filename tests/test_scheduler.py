"""Decisions of one step: who gets blocks, who loses them, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import FakeClock, Harness, greedy, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Priority


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([1, 7, 64]),
)
def test_at_most_one_partly_filled_block_is_wasted_per_sequence(
    lengths: list[tuple[int, int]], block_size: int, chunk: int
) -> None:
    harness = Harness(num_blocks=200, block_size=block_size, max_step_tokens=chunk, max_running=4)
    for i, (prompt, output) in enumerate(lengths):
        harness.submit(request_of(f"r{i}", prompt_of([i] * prompt), max_tokens=output))
    while not harness.engine.is_idle:
        harness.step()
        for group in harness.engine._scheduler.queues.running:
            for seq in group.members:
                # Tokens known now, the one just drawn aside: its block comes with the next step.
                assert len(seq.table) * block_size - (len(seq.tokens) - 1) <= block_size
                assert len(seq.table) * block_size >= seq.num_computed


def test_the_whole_demand_of_an_image_is_there_before_it_is_admitted() -> None:
    """30 tokens need 8 blocks; 7 are free: it waits, although its first chunk would fit."""
    harness = Harness(num_blocks=10, max_step_tokens=8)
    harness.submit(request_of("first", prompt_of([1] * 8), max_tokens=5))
    harness.step()
    harness.submit(request_of("image", prompt_of([2], ("A", 28), [3]), max_tokens=2))
    harness.step()
    assert harness.engine.stats().waiting == 1 and harness.engine.stats().kv_blocks_held == 3
    harness.run()
    harness.assert_clean()


def test_a_request_that_lacks_blocks_is_not_overtaken() -> None:
    harness = Harness(num_blocks=10)
    harness.submit(request_of("first", prompt_of([1] * 8), max_tokens=5))
    harness.step()
    harness.submit(request_of("large", prompt_of([2] * 30), max_tokens=2))
    harness.submit(request_of("small", prompt_of([3] * 2), max_tokens=2))
    harness.run()
    order = list(dict.fromkeys(key[0] for key in harness.answers))
    assert order == ["first", "large", "small"]


def test_writing_to_a_shared_block_copies_it_once_per_writer_but_the_last() -> None:
    harness = Harness()
    harness.submit(request_of("r", prompt_of([1] * 6), n=3, temperature=1.0, seed=5, max_tokens=3))
    harness.step()
    harness.step()
    plan = harness.backend.plans[1]
    source = plan.items[-1].block_table[1]
    assert [copied for copied, _ in plan.copies] == [source, source]
    assert len({item.block_table[1] for item in plan.items}) == 3
    assert len({item.block_table[0] for item in plan.items}) == 1
    harness.run()
    harness.assert_clean()


@pytest.mark.parametrize(
    ("classes", "victim"),
    [
        (["interactive", "interactive", "interactive"], "r2"),
        (["interactive", "batch", "interactive"], "r1"),
        (["batch", "batch", "interactive"], "r1"),
    ],
)
def test_the_lowest_class_and_then_the_newest_is_preempted(classes: list[Priority], victim: str) -> None:
    clock = FakeClock()
    harness = Harness(num_blocks=9, block_size=2, clock=clock, preemption="recompute")
    for i, priority in enumerate(classes):
        clock.now += 1.0
        harness.submit(request_of(f"r{i}", prompt_of([i] * 3), priority, max_tokens=8))
    while not harness.engine.stats().preempted_recompute:
        harness.step()
    assert [group.id for group in harness.engine._scheduler.queues.waiting] == [victim]
    harness.run()
    for i in range(3):
        assert harness.answer(f"r{i}").token_ids == greedy(prompt_of([i] * 3), 8)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60))
def test_the_swap_rule_decides_at_its_crossover(crossover: int) -> None:
    """Swap exactly where the rule says that copying blocks is cheaper than recomputing tokens."""
    asked: list[tuple[int, int]] = []

    def rule(num_tokens: int, num_blocks: int) -> bool:
        asked.append((num_tokens, num_blocks))
        return num_tokens >= crossover

    harness = Harness(num_blocks=10, block_size=2, swap_rule=rule)
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([i] * (2 + i)), max_tokens=12))
    harness.run()
    stats = harness.engine.stats()
    assert asked and all(blocks == -(-tokens // 2) for tokens, blocks in asked)
    assert stats.preempted_swap == sum(tokens >= crossover for tokens, _ in asked)
    assert stats.preempted_recompute == sum(tokens < crossover for tokens, _ in asked)


def test_without_a_rule_preemption_recomputes() -> None:
    harness = Harness(num_blocks=10, block_size=2)
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([i] * 3), max_tokens=12))
    harness.run()
    stats = harness.engine.stats()
    assert stats.preempted_recompute > 0 and stats.preempted_swap == 0


def test_a_swapped_request_computes_nothing_twice() -> None:
    harness = Harness(num_blocks=10, block_size=2, preemption="swap", prefix_cache=False)
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([i] * 3), max_tokens=12))
    harness.run()
    assert harness.engine.stats().preempted_swap > 0
    assert harness.backend.num_tokens == 3 * (3 + 12 - 1)


def test_a_swapped_requests_blocks_are_found_again() -> None:
    """What was swapped in is published anew, so that a second turn hits it."""
    harness = Harness(num_blocks=12, block_size=2, preemption="swap")
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([i] * 3), max_tokens=12))
    harness.run()
    assert harness.engine.stats().preempted_swap > 0
    last = max(range(3), key=lambda i: [key[0] for key in harness.answers].index(f"r{i}"))
    harness.submit(
        request_of("turn", prompt_of([last] * 3 + harness.answer(f"r{last}").token_ids), max_tokens=1)
    )
    harness.run()
    usage = harness.finished["turn"].usage
    assert usage is not None and usage.cached_tokens == 14


def test_a_preempted_request_holds_no_visual_tokens() -> None:
    """Its image may be evicted while it waits, and the image's room serves others."""
    harness = Harness(num_blocks=12, block_size=2, max_step_tokens=4, preemption="recompute")
    harness.submit(request_of("first", prompt_of([1] * 2), max_tokens=20))
    harness.step()
    harness.submit(request_of("image", prompt_of([2], ("A", 14), [3]), "batch", max_tokens=2))
    for _ in range(2):
        harness.step()
    assert harness.visuals.holds == {image_key("A"): 1}
    harness.submit(request_of("now", prompt_of([4] * 3), max_tokens=2))
    harness.step()
    assert harness.engine.stats().preempted_recompute == 1 and not harness.visuals.holds
    harness.run()
    harness.assert_clean()


def test_decodes_come_first_and_chunks_share_what_is_left() -> None:
    harness = Harness(max_step_tokens=6)
    for i in range(3):
        harness.submit(request_of(f"d{i}", prompt_of([i]), max_tokens=20))
    harness.step()
    harness.submit(request_of("long", prompt_of([4] * 20)))
    harness.step()
    assert [(i.start, len(i.token_ids)) for i in harness.backend.plans[-1].items] == [(1, 1)] * 3 + [(0, 3)]
    harness.run()


def test_interactive_prompts_are_computed_before_earlier_batch_prompts() -> None:
    harness = Harness(max_step_tokens=4)
    harness.submit(request_of("batch", prompt_of([1] * 20), "batch"))
    harness.step()
    harness.submit(request_of("now", prompt_of([2] * 8)))
    for _ in range(2):
        harness.step()
    assert ("now", 0) in harness.answers
    harness.run()


def busy_with_batch(harness: Harness, count: int = 6) -> None:
    for i in range(count):
        harness.submit(request_of(f"b{i}", prompt_of([i] * 30), "batch", max_tokens=40))
    for _ in range(9):
        harness.step()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.sampled_from([4, 16, 64]), st.sampled_from([3, 8]), st.integers(0, 6))
def test_beside_batch_work_a_first_token_takes_as_many_steps_as_on_an_idle_engine(
    length: int, max_step_tokens: int, max_running: int, num_batch: int
) -> None:
    """users.md S7: whatever runs, and also when all slots are taken."""

    def steps_to_first(num_batch: int) -> int:
        harness = Harness(num_blocks=200, max_step_tokens=max_step_tokens, max_running=max_running)
        busy_with_batch(harness, num_batch)
        harness.submit(request_of("now", prompt_of([20 + i % 9 for i in range(length)])))
        before = len(harness.backend.plans)
        while ("now", 0) not in harness.answers:
            harness.step()
            plan = harness.backend.plans[-1]
            assert len(plan.items) == 1  # nothing of the batch shares the prompt's steps
        steps = len(harness.backend.plans) - before
        harness.run()
        harness.assert_clean()
        return steps

    assert steps_to_first(num_batch) == steps_to_first(0)


def test_batch_work_goes_on_while_an_interactive_prompt_waits_for_its_image() -> None:
    harness = Harness(num_blocks=200, encodes=False)
    busy_with_batch(harness, 2)
    harness.submit(request_of("now", prompt_of([9] * 2, ("img", 4)), max_tokens=3))
    for _ in range(4):
        harness.step()
        assert len(harness.backend.plans[-1].items) >= 2
    harness.encode(image_key("img"))
    harness.step()
    assert ("now", 0) in harness.answers
    harness.run()


def test_aged_batch_work_shares_the_steps_of_interactive_prompts() -> None:
    """Endless interactive prompts hold a batch up for no longer than its ageing time."""
    clock = FakeClock()
    harness = Harness(num_blocks=400, max_step_tokens=8, clock=clock, ageing_s=5.0, prefix_cache=False)
    harness.submit(request_of("batch", prompt_of([1] * 4), "batch", max_tokens=30))
    harness.step()
    for number in range(40):
        clock.now += 0.5
        harness.submit(request_of(f"i{number}", prompt_of([number % 30] * 8), max_tokens=1))
        harness.step()
    assert len(harness.answer("batch").token_ids) > 15
    harness.run()


def test_a_step_of_batch_work_alone_is_short() -> None:
    harness = Harness(num_blocks=200, max_step_tokens=64, max_batch_chunk_tokens=10)
    for i in range(3):
        harness.submit(request_of(f"b{i}", prompt_of([i] * 30), "batch", max_tokens=5))
    harness.run()
    assert all(
        sum(len(item.token_ids) for item in plan.items if len(item.token_ids) > 1) <= 10
        for plan in harness.backend.plans
    )


def test_batch_work_that_computes_an_interactive_requests_prefix_counts_as_interactive() -> None:
    harness = Harness(num_blocks=200, max_step_tokens=8)
    busy_with_batch(harness, 3)
    shared = [7] * 24
    harness.submit(request_of("owner", prompt_of(shared), "batch", max_tokens=20))
    harness.step()
    harness.submit(request_of("now", prompt_of([*shared, 1, 2])))
    steps = 0
    while ("now", 0) not in harness.answers:
        harness.step()
        steps += 1
    assert steps <= 5
    harness.run()


@pytest.mark.parametrize("settings_", [{}, {"prefix_cache": False}])
def test_a_hit_never_covers_the_last_token(settings_: dict[str, Any]) -> None:
    """A fully cached prompt still yields logits; text-only prompts hit too."""
    for length in (1, 4, 5, 8, 9):
        harness = Harness(**settings_)
        for turn in range(2):
            harness.submit(request_of(f"r{turn}", prompt_of([1] * length), max_tokens=1))
            harness.run()
        usage = harness.finished["r1"].usage
        assert usage is not None
        assert usage.cached_tokens == (0 if settings_ else (length - 1) // 4 * 4)
        assert harness.answer("r0") == harness.answer("r1")


def test_a_second_turn_hits_the_first_turns_answer() -> None:
    harness = Harness()
    harness.submit(request_of("one", prompt_of([1] * 6), max_tokens=7))
    harness.run()
    turn = prompt_of([1] * 6 + harness.answer("one").token_ids + [2])
    harness.submit(request_of("two", turn))
    harness.run()
    usage = harness.finished["two"].usage
    assert usage is not None and usage.cached_tokens == 12
    assert harness.answer("two").token_ids == greedy(turn, 8)


def test_other_namespaces_share_nothing() -> None:
    harness = Harness()
    for name in ("one", "two"):
        harness.submit(request_of(name, prompt_of([1] * 9), namespace=name))
        harness.run()
    assert harness.engine.stats().prefix_hit_tokens == 0


def test_two_runs_make_the_same_plans() -> None:
    def plans() -> list[Any]:
        harness = Harness(num_blocks=20, max_step_tokens=7)
        for i in range(6):
            prompt = prompt_of([i % 2] * 5, ("AB"[i % 2], 6), [i])
            harness.submit(request_of(f"r{i}", prompt, n=1 + i % 2, temperature=1.0, seed=i))
        harness.run()
        return [
            (plan.copies, [(i.token_ids, i.start, i.block_table) for i in plan.items])
            for plan in harness.backend.plans
        ]

    assert plans() == plans()
