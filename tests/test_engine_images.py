"""Images in the engine: asked for once, never confused, never computed twice, never leaked."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import FakeClock, Harness, greedy, image_key, prompt_of, request_of, visual_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import ImageSpan, Prompt

A, B = image_key("A"), image_key("B")
QUESTION = prompt_of([1, 2], ("A", 9), [3, 4, 5])


def block_tables(harness: Harness) -> dict[tuple[int, ...], None]:
    return {item.block_table: None for plan in harness.backend.plans for item in plan.items}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 9))
def test_same_text_with_another_image_gets_its_own_answer(before: int, length: int, after: int) -> None:
    """C1: cached tokens never go beyond the text before the image; no block is shared after it."""
    prompts = [prompt_of([1] * before, (name, length), [2] * after) for name in "AB"]
    harness = Harness()
    for name, prompt in zip("AB", prompts, strict=True):
        harness.submit(request_of(name, prompt))
        harness.run()
        assert harness.answer(name).token_ids == greedy(prompt, 8)
    usage = harness.finished["B"].usage
    assert usage is not None and usage.cached_tokens <= before


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6))
def test_same_ids_with_another_image_never_share_a_block(before: int, length: int, after: int) -> None:
    """C2: both run at the same time; tables meet only in blocks wholly before the image."""
    harness = Harness()
    for name in "AB":
        harness.submit(request_of(name, prompt_of([1] * before, (name, length), [2] * after), max_tokens=9))
    harness.run()
    tables: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for plan in harness.backend.plans:
        for item in plan.items:
            # The question's own rows tell whose table it is.
            for visual in item.visuals:
                name = 0 if (visual.rows[0] == visual_rows(A, 12)[int(visual.rows[0][1])]).all() else 1
                tables[name].add(item.block_table[before // 4 : -(-(before + length) // 4)])
    blocks = [{block for table in tables[name] for block in table} for name in (0, 1)]
    assert blocks[0] and blocks[1] and not blocks[0] & blocks[1]


def test_other_rows_of_the_same_image_never_share_a_block() -> None:
    """C2: two tiles of one image, same ids, other offset."""
    harness = Harness()
    prompts = [
        Prompt((30,) * 8 + (1,), (ImageSpan(0, 4, A, 4 * i), ImageSpan(4, 4, A, 4 - 4 * i))) for i in (0, 1)
    ]
    for i, prompt in enumerate(prompts):
        harness.submit(request_of(f"r{i}", prompt))
        harness.run()
        assert harness.answer(f"r{i}").token_ids == greedy(prompt, 8)
    assert harness.engine.stats().prefix_hit_tokens == 0


def test_a_follow_up_question_needs_no_visual_tokens() -> None:
    harness = Harness()
    harness.submit(request_of("first", QUESTION))
    harness.run()
    harness.visuals.evict_unheld()
    harness.submit(request_of("again", prompt_of([1, 2], ("A", 9), [9])))
    harness.run()
    # 11 tokens to the image's end: blocks of 4 cover 8 of them, the rest needs rows again.
    assert [want.request_id for want in harness.wants] == ["first", "again"]
    harness.visuals.evict_unheld()
    aligned = Harness()
    for name in ("first", "again"):
        aligned.submit(request_of(name, prompt_of([1, 2], ("A", 6), [8 if name == "first" else 9])))
        aligned.run()
        aligned.visuals.evict_unheld()
    assert [want.request_id for want in aligned.wants] == ["first"]
    usage = aligned.finished["again"].usage
    assert usage is not None and (usage.cached_tokens, usage.image_tokens) == (8, 6)
    assert aligned.answer("again").token_ids == greedy(prompt_of([1, 2], ("A", 6), [9]), 8)


def test_a_known_image_in_the_visual_cache_is_not_asked_for() -> None:
    harness = Harness(prefix_cache=False)
    harness.rows_of[A] = 9
    harness.encode(A)
    harness.submit(request_of("r", QUESTION))
    harness.run()
    assert harness.wants == []
    harness.assert_clean()


def test_only_the_new_image_is_asked_for() -> None:
    """C6: [A seen, B new] encodes only B; an image used twice in one prompt is asked for once."""
    harness = Harness()
    harness.submit(request_of("one", prompt_of([1], ("A", 5), [2])))
    harness.run()
    harness.submit(request_of("two", prompt_of([1], ("A", 5), [2], ("B", 4), [3], ("B", 4), [4])))
    harness.run()
    assert [want.key for want in harness.wants] == [A, B]


def test_twenty_clients_with_one_new_image_compute_it_once() -> None:
    """Single flight: asked for by key once it is there nobody asks again, and its prefix is computed once."""
    prompts = [prompt_of([1, 2], ("A", 30), [3 + i]) for i in range(20)]
    harness = Harness(num_blocks=200, max_running=32)
    for i, prompt in enumerate(prompts):
        harness.submit(request_of(f"r{i}", prompt, max_tokens=4))
    harness.run()
    assert harness.visuals.num_puts == 1
    # 33 tokens: 8 blocks of 4 once, then the last token of each; 3 decodes each.
    assert harness.backend.num_tokens == 32 + 20 * (1 + 3)
    stats = harness.engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20 * 33, 19 * 32)
    for i, prompt in enumerate(prompts):
        assert harness.answer(f"r{i}").token_ids == greedy(prompt, 4)
    harness.assert_clean()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_if_the_first_dies_a_waiter_takes_over(steps: int) -> None:
    harness = Harness(max_step_tokens=8)
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([1, 2], ("A", 30), [3 + i])))
    for _ in range(steps):
        harness.step()
    harness.engine.cancel("r0")
    harness.run()
    harness.assert_clean()
    for i in (1, 2):
        assert harness.answer(f"r{i}").token_ids == greedy(prompt_of([1, 2], ("A", 30), [3 + i]), 8)
    assert harness.backend.num_tokens <= 8 * steps + 32 + 2 * (1 + 7)


def test_a_waiter_of_higher_class_lends_its_rank_to_the_first() -> None:
    """No inversion: interactive work waits for batch work on its own prefix, not for what is before it."""
    harness = Harness(max_step_tokens=8, max_running=8)
    for i in range(4):
        harness.submit(request_of(f"b{i}", prompt_of([i] * 40), "batch"))
    harness.step()
    harness.submit(request_of("now", prompt_of([3] * 40), "interactive"))
    for _ in range(7):
        harness.step()
    assert ("now", 0) in harness.answers and ("b0", 0) not in harness.answers


def test_a_chunk_is_cut_just_before_an_image_that_is_not_there() -> None:
    harness = Harness(encodes=False)
    harness.submit(request_of("r", prompt_of([1] * 6, ("A", 5), [2])))
    harness.step()
    assert [item.start + len(item.token_ids) for item in harness.backend.plans[0].items] == [6]
    harness.step()
    assert not harness.engine.has_work and len(harness.backend.plans) == 1
    harness.encode(A)
    assert harness.engine.has_work
    harness.run()
    assert harness.answer("r").token_ids == greedy(prompt_of([1] * 6, ("A", 5), [2]), 8)
    assert [want.key for want in harness.wants] == [A]


def test_waiting_for_an_image_holds_neither_slot_nor_blocks_nor_others() -> None:
    harness = Harness(encodes=False, max_running=1)
    harness.submit(request_of("image", prompt_of([1], ("A", 5), [2])))
    harness.submit(request_of("text", prompt_of([1, 2, 3])))
    harness.step()
    assert harness.engine.stats().kv_blocks_held == 1
    while ("text", 0) not in harness.answers or harness.answer("text").reason is None:
        harness.step()
    assert harness.engine.stats().kv_blocks_held == 0 and harness.visuals.holds == {A: 1}
    harness.encode(A)
    harness.run()
    harness.assert_clean()


def test_only_so_many_waiting_requests_ask_for_images() -> None:
    harness = Harness(encodes=False, visual_lookahead=3)
    for i in range(8):
        harness.submit(request_of(f"r{i}", prompt_of([1], (f"{i}", 5), [2])))
    for _ in range(3):
        harness.step()
    assert [want.request_id for want in harness.wants] == ["r0", "r1", "r2"]
    harness.encode(image_key("1"))
    for _ in range(3):
        harness.step()
    assert [want.request_id for want in harness.wants] == ["r0", "r1", "r2", "r3"]
    harness.encodes = True
    for want in harness.wants:
        harness.encode(want.key)
    harness.run()
    harness.assert_clean()


@pytest.mark.parametrize("encodes", [True, False])
def test_without_room_only_so_many_waiting_requests_hold_visual_tokens(encodes: bool) -> None:
    harness = Harness(encodes=encodes, visual_lookahead=3, max_running=1)
    harness.submit(request_of("long", prompt_of([1]), max_tokens=30))
    for i in range(8):
        harness.submit(request_of(f"r{i}", prompt_of([1], (f"{i}", 5), [2])))
    for _ in range(10):
        harness.step()
        assert len(harness.visuals.holds) <= 3
    assert [want.request_id for want in harness.wants] == ["r0", "r1", "r2"]
    harness.encodes = True
    for want in harness.wants:
        harness.encode(want.key)
    harness.run()
    harness.assert_clean()


def test_a_warm_image_passes_requests_that_wait_for_theirs() -> None:
    harness = Harness(visual_lookahead=2)
    harness.submit(request_of("first", prompt_of([1], ("A", 7), [2])))
    harness.run()
    harness.encodes = False
    harness.visuals.evict_unheld()
    for i in range(5):
        harness.submit(request_of(f"cold{i}", prompt_of([1], (f"{i}", 5), [2])))
    harness.step()
    harness.submit(request_of("warm", prompt_of([1], ("A", 7), [3])))
    harness.step()
    assert ("warm", 0) in harness.answers


def test_failed_visual_tokens_fail_only_the_requests_that_need_them() -> None:
    harness = Harness(encodes=False)
    harness.submit(request_of("bad1", prompt_of([1], ("A", 5), [2])))
    harness.submit(request_of("bad2", prompt_of([1] * 8, ("A", 5), [2])))
    harness.submit(request_of("good", prompt_of([1], ("B", 5), [2])))
    harness.step()
    harness.visuals.failures[A] = ("image_unreadable", "the image cannot be decoded")
    harness.encode(B)
    harness.run()
    harness.assert_clean()
    assert {f.request_id: (f.code, f.message) for f in harness.failed.values()} == {
        "bad1": ("image_unreadable", "the image cannot be decoded"),
        "bad2": ("image_unreadable", "the image cannot be decoded"),
    }
    assert harness.answer("good").token_ids == greedy(prompt_of([1], ("B", 5), [2]), 8)


@pytest.mark.parametrize("rows", [4, 6])
def test_a_wrong_number_of_visual_tokens_fails_only_that_request(rows: int) -> None:
    """P10: the next one is served. Only when they were asked for again and are wrong again."""
    harness = Harness(encodes=False)
    harness.submit(request_of("bad", prompt_of([1], ("A", 5), [2])))
    harness.submit(request_of("good", prompt_of([1], ("B", 5), [2])))
    harness.step()
    harness.visuals.put(A, rows)
    harness.step()
    harness.visuals.put(A, rows)
    harness.encode(B)
    harness.run()
    assert harness.visuals.get(A) is None, "the next request would find them"
    harness.assert_clean()
    assert harness.failed["bad"].code == "visual_tokens_mismatch"
    assert harness.failed["bad"].message == f"An image has 5 placeholders but {rows} visual tokens."
    assert harness.answer("good").token_ids == greedy(prompt_of([1], ("B", 5), [2]), 8)
    harness.submit(request_of("next", prompt_of([4, 5])))
    harness.run()
    assert harness.answer("next").token_ids == greedy(prompt_of([4, 5]), 8)


@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("when", ["before", "after"])
def test_visual_tokens_of_another_number_than_planned_are_a_miss(when: str, rows: int) -> None:
    """Found in the cache, or come for all who wait: they are asked for anew."""
    harness = Harness(encodes=False)
    if when == "before":
        harness.visuals.put(A, rows)
    prompts = {f"r{i}": prompt_of([1, i], ("A", 5), [2], ("A", 5), [3]) for i in range(3)}
    for name, prompt in prompts.items():
        harness.submit(request_of(name, prompt))
    harness.step()
    asked = len(harness.wants)
    if when == "after":
        harness.visuals.put(A, rows)
        harness.step()
        assert len(harness.wants) == 2 * asked
    assert harness.visuals.get(A) is None
    harness.encode(A)
    harness.run()
    harness.assert_clean()
    for name, prompt in prompts.items():
        assert harness.answer(name).token_ids == greedy(prompt, 8)


@pytest.mark.parametrize("first", [5, 6])
def test_requests_that_plan_other_numbers_for_one_key_all_end(first: int) -> None:
    """Two nodes of unlike versions: one of the plans is wrong, and neither request waits for ever."""
    harness = Harness()
    for name, count in (("five", 5), ("six", 6)):
        harness.submit(request_of(name, prompt_of([1], ("A", count), [2])))
    harness.rows_of[A] = first
    harness.run()
    harness.assert_clean()
    right, wrong = ("five", "six") if first == 5 else ("six", "five")
    assert harness.answer(right).token_ids == greedy(prompt_of([1], ("A", first), [2]), 8)
    assert harness.failed[wrong].code == "visual_tokens_mismatch"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_images_evicted_while_preempted_are_asked_for_again(preemption: str, data: st.DataObject) -> None:
    """Unheld rows vanish at random moments; answers stay right and nobody waits for ever."""
    harness = Harness(num_blocks=9, prefix_cache=False, preemption=preemption, max_step_tokens=6)
    prompts = {f"r{i}": prompt_of([i] * i, ("ABC"[i], 6), [4] * 3) for i in range(3)}
    for name, prompt in prompts.items():
        harness.submit(request_of(name, prompt, max_tokens=14))
    for _ in range(2000):
        if harness.engine.is_idle:
            break
        assert harness.engine.has_work
        harness.step()
        if data.draw(st.integers(0, 3)) == 0:
            harness.visuals.evict_unheld()
    harness.assert_clean()
    for name, prompt in prompts.items():
        assert harness.answer(name).token_ids == greedy(prompt, 14)


@pytest.mark.parametrize("settings_", [{}, {"max_step_tokens": 3}, {"max_running": 1}, {"encodes": False}])
def test_holds_on_visual_tokens_return_to_zero_after_cancel(settings_: dict[str, Any]) -> None:
    """C7: waiting, running and finished requests alike."""
    for steps in range(12):
        harness = Harness(**settings_)
        for i in range(3):
            harness.submit(request_of(f"r{i}", prompt_of([i] * 5, ("ABC"[i], 6), [4] * 3), max_tokens=3))
        for _ in range(steps):
            harness.step()
        for i in range(3):
            harness.engine.cancel(f"r{i}")
        harness.assert_clean()


def test_an_image_is_held_until_its_last_span_is_computed() -> None:
    harness = Harness(max_step_tokens=4)
    harness.submit(
        request_of("r", prompt_of([1], ("A", 5), [2], ("B", 5), [2], ("A", 5), [3] * 9), max_tokens=9)
    )
    held = []
    while not harness.engine.is_idle:
        harness.step()
        held.append("".join(sorted(key[-1] for key in harness.visuals.holds)))
    # Positions computed: wait, then 4 more each step; B's span ends at 12, A's second one at 18.
    assert held[:7] == ["AB", "AB", "AB", "A", "A", "", ""]


def test_encode_time_is_told_apart_from_queueing() -> None:
    clock = FakeClock()
    harness = Harness(encodes=False, clock=clock)
    harness.submit(request_of("r", prompt_of([1], ("A", 5), [2]), max_tokens=3))
    clock.now = 1.0
    harness.step()
    clock.now = 4.0
    harness.encode(A)
    harness.step()
    clock.now = 4.5
    harness.step()
    clock.now = 5.0
    harness.run()
    timings = harness.finished["r"].timings
    assert timings is not None
    assert (timings.queue_ms, timings.encode_ms, timings.ttft_ms, timings.total_ms) == (
        1000,
        3000,
        4000,
        5000,
    )
    assert timings.tpot_ms == 500


def test_usage_equals_what_the_counters_say() -> None:
    """P11: never null, and the sums over requests are the metrics' deltas."""
    harness = Harness()
    for turn in range(2):
        for i in range(3):
            harness.submit(
                request_of(f"{turn}{i}", prompt_of([i] * 4, ("AB"[i % 2], 6), [4] * 3), max_tokens=5)
            )
        harness.run()
    usages = [finished.usage for finished in harness.finished.values() if finished.usage is not None]
    stats = harness.engine.stats()
    assert len(usages) == 6
    assert sum(usage.cached_tokens for usage in usages) == stats.prefix_hit_tokens > 0
    assert sum(usage.prompt_tokens for usage in usages) == stats.prefix_query_tokens
    assert sum(usage.completion_tokens for usage in usages) == stats.generated_tokens == 30
    assert {usage.image_tokens for usage in usages} == {6}
