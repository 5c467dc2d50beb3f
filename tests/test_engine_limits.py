"""What never fits is refused with its numbers; every wait is bounded; who leaves, leaves nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from fake_backend import FakeClock, Harness, greedy, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Delta, Failed, ImageSpan, Priority, Prompt, RequestError

A = image_key("A")


def refusal(harness: Harness, *parts: Any, **params: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        harness.submit(request_of("r", prompt_of(*parts), **params))
    harness.assert_clean()
    return error.value


def test_a_prompt_beyond_the_context_is_refused_with_its_numbers() -> None:
    """P7: never cut, least of all inside an image."""
    error = refusal(Harness(max_positions=20), [1] * 4, ("A", 9), max_tokens=8)
    assert error.code == "context_length_exceeded"
    assert error.message == "4 text tokens + 9 image tokens + 8 to generate exceed the context of 20 tokens."


def test_a_request_that_can_never_fit_in_the_pool_is_refused_with_its_numbers() -> None:
    """P9"""
    error = refusal(Harness(num_blocks=5), [1] * 4, ("A", 9), max_tokens=8)
    assert error.code == "kv_capacity_exceeded"
    assert error.message == (
        "4 text tokens + 9 image tokens + 8 to generate, 1 sequence(s), "
        "need 6 KV blocks of 4 tokens; there are 5."
    )


@pytest.mark.parametrize("params", [{"n": 3}, {"beam_width": 3}])
def test_forks_count_towards_the_pool(params: dict[str, Any]) -> None:
    """13 + 8 tokens: 3 shared blocks, 3 more for each of three sequences."""
    assert refusal(Harness(num_blocks=11), [1] * 13, **params).code == "kv_capacity_exceeded"
    harness = Harness(num_blocks=12)
    harness.submit(request_of("r", prompt_of([1] * 13), **params))
    harness.run()
    harness.assert_clean()


@given(
    num_prompt=st.integers(1, 60),
    blocks=st.integers(1, 24),
    width=st.integers(1, 4),
    asked=st.integers(1, 90),
)
@settings(deadline=None, max_examples=100)
def test_a_length_that_nobody_asked_for_is_the_largest_that_the_pool_holds(
    num_prompt: int, blocks: int, width: int, asked: int
) -> None:
    """P9: refused only where not even one token has room beside the prompt."""
    prompt = prompt_of([1] * num_prompt)

    def served(max_tokens: int, fits: bool) -> int | None:
        """Tokens of each choice, or None: refused."""
        harness = Harness(num_blocks=blocks)
        params = {"max_tokens": max_tokens, "fit_max_tokens": fits, "n": width, "ignore_eos": True}
        try:
            harness.submit(request_of("r", prompt, **params))
        except RequestError as error:
            assert error.code == "kv_capacity_exceeded"
            return None
        group = harness.engine._groups["r"]
        harness.engine.cancel("r")
        harness.assert_clean()
        return group.request.params.max_tokens

    largest = max((n for n in range(1, asked + 1) if served(n, False) is not None), default=None)
    assert served(asked, True) == largest


def test_an_image_beyond_the_limit_is_refused_at_admission() -> None:
    """P8: the scheduler never sees what it could only spin on."""
    error = refusal(Harness(max_image_tokens=8), [1], ("A", 9))
    assert (error.code, error.message) == ("image_tokens_exceeded", "9 image tokens exceed the limit of 8.")


def test_a_request_that_fits_exactly_is_served() -> None:
    """P8, P9: at the very limit of pool and context there is no hang, whoever else is there."""
    harness = Harness(num_blocks=5, max_positions=20)
    for i in range(3):
        harness.submit(request_of(f"r{i}", prompt_of([i] * 3, ("A", 9)), max_tokens=8))
    harness.run()
    harness.assert_clean()
    for i in range(3):
        assert harness.answer(f"r{i}").token_ids == greedy(prompt_of([i] * 3, ("A", 9)), 8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(()), "The prompt is empty"),
        (Prompt((1, 32)), "A token id is out of range"),
        (Prompt((1, -1)), "A token id is out of range"),
        (Prompt((30,) * 4, (ImageSpan(2, 3, A, 0),)), "An image span exceeds the prompt"),
        (Prompt((30,) * 4, (ImageSpan(0, 2, A, 0), ImageSpan(1, 2, A, 2))), "Image spans must be sorted"),
        (Prompt((30,) * 4, (ImageSpan(0, 0, A, 0),)), "Image spans must be sorted"),
    ],
)
def test_malformed_prompts_are_refused(prompt: Prompt, message: str) -> None:
    harness = Harness()
    with pytest.raises(RequestError, match=message) as error:
        harness.submit(request_of("r", prompt))
    assert error.value.code == "invalid_prompt"
    harness.assert_clean()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.submit(request_of("r", prompt_of([1])))
    with pytest.raises(RequestError) as error:
        harness.submit(request_of("r", prompt_of([2])))
    assert error.value.code == "duplicate_request_id"
    harness.run()
    harness.submit(request_of("r", prompt_of([2])))
    harness.run()
    harness.assert_clean()


def test_cancel_at_every_stage_frees_all_at_once() -> None:
    """S4: waiting, prefilling, decoding, forked, swapped out, ended, unknown."""
    for preemption in ("recompute", "swap"):
        for steps in range(24):
            harness = Harness(num_blocks=14, max_step_tokens=5, max_running=4, preemption=preemption)
            for i in range(4):
                prompt = prompt_of([i] * 5, ("AB"[i % 2], 6), [4])
                harness.submit(
                    request_of(f"r{i}", prompt, n=1 + i % 2, temperature=1.0, seed=i, max_tokens=12)
                )
            for _ in range(steps):
                harness.step()
            seen = len(harness.events)
            for i in (2, 0, 1, 3):
                harness.engine.cancel(f"r{i}")
                harness.engine.check_integrity()
            harness.engine.cancel("never")
            harness.assert_clean()
            harness.step()
            assert len(harness.events) == seen


def test_a_backend_failure_fails_only_that_steps_requests() -> None:
    harness = Harness(max_running=1)
    harness.submit(request_of("lost", prompt_of([1, 2])))
    harness.submit(request_of("kept", prompt_of([3, 4])))
    harness.step()
    harness.backend.fail_next = True
    harness.run()
    harness.assert_clean()
    assert list(harness.failed) == ["lost"] and harness.failed["lost"].code == "internal_error"
    assert "device lost" not in harness.failed["lost"].message
    assert harness.answer("kept").token_ids == greedy(prompt_of([3, 4]), 8)
    assert harness.engine.stats().failed_steps == 1


HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("interactive"), st.integers(1, 30)),
        st.tuples(st.just("batch"), st.integers(1, 30)),
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(HISTORIES, st.sampled_from([1, 4, 9]))
def test_a_running_decode_gets_a_token_every_step_of_bounded_size(
    history: list[tuple[str, int]], chunk: int
) -> None:
    """S5: the wait for the next token is one step, and a step holds no more than the running decodes and
    max(min_chunk, max_step - decodes) prompt tokens. Only batch work gives way: to interactive prompts, and
    with its slot to interactive requests."""
    harness = Harness(num_blocks=400, max_step_tokens=chunk, max_running=6)
    count = 0
    for action, value in [*history, *[("wait", 1)] * 200]:
        if action in ("interactive", "batch"):
            harness.submit(request_of(f"r{count}", prompt_of([value] * value), max_tokens=9, priority=action))
            count += 1
        elif action == "cancel":
            harness.engine.cancel(f"r{value}")
        else:
            started = {key[0] for key, answer in harness.answers.items() if answer.reason is None}
            groups = dict(harness.engine._groups)
            alive = started & set(groups)
            prompts = {name for name in set(groups) - started if groups[name].priority == "interactive"}
            events = harness.step()
            served = {event.request_id for event in events if isinstance(event, Delta)}
            assert all(groups[name].priority == "batch" for name in alive - served)
            ended = groups.keys() - harness.engine._groups.keys()
            num_slots = len(harness.engine._scheduler.queues.running) + len(ended)
            assert prompts or alive <= served or num_slots == 6  # all of them in use: batch work had to wait
            if harness.engine.is_idle:
                continue
            plan = harness.backend.plans[-1]
            decodes = sum(len(item.token_ids) == 1 and item.num_logits == 1 for item in plan.items)
            assert plan.num_tokens <= decodes + max(1, chunk)
    harness.run()
    harness.assert_clean()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["interactive", "batch"]), st.integers(0, 9)), min_size=1, max_size=25)
)
def test_batch_work_is_overtaken_only_within_its_ageing_time(arrivals: list[tuple[Priority, int]]) -> None:
    """S7 and its limit: no request submitted more than ageing_s after a batch request starts before it;
    and no batch request starts before an interactive one that was already waiting, unless aged."""
    ageing = 10.0
    clock = FakeClock()
    harness = Harness(max_running=2, ageing_s=ageing, clock=clock, prefix_cache=False)
    submitted: dict[str, float] = {}
    first: dict[str, int] = {}
    kind: dict[str, str] = {}
    step = 0
    pending = list(enumerate(arrivals))
    while pending or not harness.engine.is_idle:
        while pending and (harness.engine.is_idle or pending[0][1][1] <= 3):
            index, (priority, _) = pending.pop(0)
            name = f"r{index}"
            harness.submit(request_of(name, prompt_of([1, 2, 3]), priority, max_tokens=3))
            submitted[name], kind[name] = clock.now, priority
        if pending:
            index, (priority, wait) = pending[0]
            pending[0] = (index, (priority, max(wait - 4, 0)))
        for event in harness.step():
            if isinstance(event, Delta):
                first.setdefault(event.request_id, step)
        step += 1
        clock.now += 1.0
    rank = {name: submitted[name] + (ageing if kind[name] == "batch" else 0.0) for name in submitted}
    for one in submitted:
        for other in submitted:
            if kind[one] == "batch" and submitted[other] > submitted[one] + ageing:
                assert first[one] <= first[other]
            if rank[one] < rank[other] and submitted[one] <= submitted[other]:
                assert first[one] <= first[other]


def test_interactive_work_takes_the_place_of_batch_work() -> None:
    """S7: all slots and all blocks are taken by batch work; an interactive request starts in the next step,
    and the batch requests lose nothing."""
    for preemption in ("recompute", "swap"):
        harness = Harness(num_blocks=16, max_running=3, preemption=preemption)
        for i in range(5):
            harness.submit(request_of(f"b{i}", prompt_of([i] * 8), "batch", max_tokens=12))
        for _ in range(3):
            harness.step()
        harness.submit(request_of("now", prompt_of([9] * 20), max_tokens=4))
        harness.step()
        assert ("now", 0) in harness.answers
        harness.run()
        harness.assert_clean()
        for i in range(5):
            assert harness.answer(f"b{i}").token_ids == greedy(prompt_of([i] * 8), 12)


def test_interactive_work_never_preempts_interactive_or_aged_work_to_start() -> None:
    clock = FakeClock()
    harness = Harness(max_running=1, clock=clock, ageing_s=5.0)
    harness.submit(request_of("aged", prompt_of([1] * 8), "batch", max_tokens=12))
    harness.step()
    clock.now = 6.0
    harness.submit(request_of("late", prompt_of([2] * 8), max_tokens=12))
    for _ in range(5):
        harness.step()
    assert ("late", 0) not in harness.answers
    harness.run()
    assert harness.engine.stats().preempted_recompute == 0


def test_an_earlier_request_whose_image_arrives_late_takes_nobodys_slot() -> None:
    harness = Harness(max_running=1, encodes=False)
    harness.submit(request_of("early", prompt_of([1], ("A", 5), [2])))
    harness.submit(request_of("late", prompt_of([3] * 4)))
    harness.step()
    harness.encode(A)
    harness.run()
    stats = harness.engine.stats()
    assert stats.preempted_recompute == stats.preempted_swap == 0
    assert harness.answer("early").token_ids == greedy(prompt_of([1], ("A", 5), [2]), 8)


def test_static_batching_waits_for_the_whole_batch() -> None:
    """The yardstick of slot use: outputs of 2 and 8 on two slots use 10 of 16 slot-steps."""
    harness = Harness(max_running=2, batching="static", prefix_cache=False)
    for i in range(4):
        harness.submit(request_of(f"r{i}", prompt_of([i]), max_tokens=2 if i % 2 else 8))
    harness.run()
    stats = harness.engine.stats()
    assert (stats.slots_used, stats.slots_offered) == (20, 32)


def test_continuous_batching_refills_slots() -> None:
    harness = Harness(max_running=2, prefix_cache=False)
    for i in range(40):
        harness.submit(request_of(f"r{i}", prompt_of([i % 30]), max_tokens=2 if i % 2 else 8))
    harness.run()
    assert harness.engine.stats().slot_use > 0.95


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_after_any_history_nothing_leaks(data: st.DataObject) -> None:
    """Submit, step, cancel, encode, fail, evict, clear in any order; check_integrity runs after each step.
    Every request ends exactly once or was cancelled, and all counters return to zero."""
    harness = Harness(
        encodes=False,
        num_blocks=data.draw(st.integers(12, 24)),
        block_size=data.draw(st.sampled_from([2, 4])),
        max_running=data.draw(st.integers(3, 6)),
        max_step_tokens=data.draw(st.sampled_from([1, 6, 64])),
        preemption=data.draw(st.sampled_from(["recompute", "swap"])),
        prefix_cache=data.draw(st.booleans()),
        visual_lookahead=data.draw(st.integers(1, 4)),
    )
    ended: defaultdict[str, int] = defaultdict(int)
    alive: set[str] = set()
    actions = [
        "submit",
        "submit",
        "step",
        "step",
        "step",
        "cancel",
        "encode",
        "fail",
        "evict",
        "clear",
        "break",
    ]
    for number in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == "submit":
            image = data.draw(st.sampled_from(["A", "B", None]))
            parts: list[Any] = [[data.draw(st.integers(0, 2))] * data.draw(st.integers(1, 6))]
            parts += [(image, {"A": 3, "B": 6}[image]), [1]] if image else []
            fork = data.draw(
                st.sampled_from([{}, {"n": 2, "temperature": 1.0}, {"beam_width": 2}, {"logprobs": 1}])
            )
            request = request_of(
                f"r{number}",
                prompt_of(*parts),
                data.draw(st.sampled_from(["interactive", "batch"])),
                max_tokens=data.draw(st.integers(1, 8)),
                ignore_eos=False,
                **fork,
            )
            try:
                harness.submit(request)
                alive.add(request.id)
            except RequestError as error:
                assert error.code == "kv_capacity_exceeded"
        elif action == "cancel" and alive:
            name = data.draw(st.sampled_from(sorted(alive)))
            harness.engine.cancel(name)
            alive.discard(name)
        elif action == "encode" and harness.wants:
            harness.encode(data.draw(st.sampled_from(harness.wants)).key)
        elif action == "fail" and harness.wants:
            key = data.draw(st.sampled_from(harness.wants)).key
            if harness.visuals.get(key) is None:
                harness.visuals.failures[key] = ("image_unreadable", "no")
        elif action == "evict":
            harness.visuals.evict_unheld()
        elif action == "clear":
            harness.engine.clear_prefix_cache()
        else:
            harness.backend.fail_next = action == "break"
            harness.step()
    harness.encodes = True
    harness.backend.fail_next = False
    for key in harness.visuals.holds:
        harness.encode(key)
    harness.run()
    harness.assert_clean()
    for event in harness.events:
        final = isinstance(event, Failed) or getattr(event, "usage", None) is not None
        ended[event.request_id] += final
    assert all(ended[name] == 1 for name in alive)
    assert all(count <= 1 for count in ended.values())
