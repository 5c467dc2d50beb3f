"""What the engine must never change: the answer. Cache, chunking, batching and preemption only cost time."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import EOS, Harness, greedy, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Prompt, Request

QUICK = settings(max_examples=25, deadline=None)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Short prompts over few ids and images, so that prefixes, blocks and images are often shared."""
    parts: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        parts.append(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
        if draw(st.booleans()):
            name = draw(st.sampled_from("ABC"))
            parts.append((name, {"A": 3, "B": 5, "C": 9}[name]))
    return prompt_of(*parts)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    return [
        request_of(
            f"r{index}",
            draw(prompts()),
            draw(st.sampled_from(["interactive", "batch"])),
            max_tokens=draw(st.integers(1, 12)),
            ignore_eos=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 6)))
    ]


def answers(requests: list[Request], **setup: Any) -> dict[str, list[int]]:
    harness = Harness(**setup)
    for request in requests:
        harness.submit(request)
    harness.run()
    harness.assert_clean()
    assert not harness.failed
    return {request.id: harness.answer(request.id).token_ids for request in requests}


def expected(requests: list[Request]) -> dict[str, list[int]]:
    return {
        r.id: greedy(r.prompt, r.params.max_tokens, None if r.params.ignore_eos else EOS) for r in requests
    }


@QUICK
@given(workloads())
def test_one_request_at_a_time_equals_plain_recomputation(requests: list[Request]) -> None:
    assert answers(requests, max_running=1, prefix_cache=False) == expected(requests)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
@QUICK
@given(requests=workloads())
def test_chunk_size_does_not_change_greedy_output(chunk: int, requests: list[Request]) -> None:
    assert answers(requests, max_step_tokens=chunk) == expected(requests)


@pytest.mark.parametrize("prefix_cache", [True, False])
@QUICK
@given(requests=workloads())
def test_cold_and_warm_answers_are_equal(prefix_cache: bool, requests: list[Request]) -> None:
    """C9: every request is asked twice, the second time on whatever the first left in the cache."""
    harness = Harness(prefix_cache=prefix_cache, max_step_tokens=9)
    for turn in ("cold", "warm"):
        for request in requests:
            harness.submit(request_of(f"{turn}-{request.id}", request.prompt, max_tokens=6))
        harness.run()
    harness.assert_clean()
    for request in requests:
        cold, warm = (harness.answer(f"{turn}-{request.id}") for turn in ("cold", "warm"))
        assert cold == warm
        assert cold.token_ids == greedy(request.prompt, 6)


@pytest.mark.parametrize("max_running", [1, 2, 16])
@QUICK
@given(requests=workloads())
def test_batch_size_does_not_change_greedy_output(max_running: int, requests: list[Request]) -> None:
    assert answers(requests, max_running=max_running, max_step_tokens=11) == expected(requests)


@QUICK
@given(requests=workloads(), data=st.data())
def test_submission_order_does_not_change_greedy_output(requests: list[Request], data: st.DataObject) -> None:
    permuted = data.draw(st.permutations(requests))
    assert answers(permuted, max_running=3, max_step_tokens=8) == expected(requests)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@settings(max_examples=40, deadline=None)
@given(requests=workloads(), block_size=st.sampled_from([1, 3, 4]), spare=st.integers(0, 4))
def test_preempted_output_is_unchanged(
    preemption: str, prefix_cache: bool, requests: list[Request], block_size: int, spare: int
) -> None:
    """The pool holds the largest request and little more."""
    largest = max(-(-(r.prompt.num_tokens + r.params.max_tokens) // block_size) for r in requests)
    out = answers(
        requests,
        num_blocks=largest + spare,
        block_size=block_size,
        preemption=preemption,
        prefix_cache=prefix_cache,
        max_step_tokens=8,
    )
    assert out == expected(requests)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_running_out_of_blocks_preempts(preemption: str) -> None:
    """The property above is not empty: growth beyond the pool really preempts, in the way asked for."""
    harness = Harness(num_blocks=10, block_size=2, preemption=preemption, max_running=4)
    requests = [request_of(f"r{i}", prompt_of([i, i, i]), max_tokens=14) for i in range(3)]
    for request in requests:
        harness.submit(request)
    harness.run()
    stats = harness.engine.stats()
    swapped, recomputed = stats.preempted_swap, stats.preempted_recompute
    assert (swapped > 0 and recomputed == 0) if preemption == "swap" else (recomputed > 0 and swapped == 0)
    assert harness.backend.num_swapped_in == harness.backend.num_swapped_out
    for request in requests:
        assert harness.answer(request.id).token_ids == greedy(request.prompt, 14)


@settings(max_examples=30, deadline=None)
@given(requests=workloads(), data=st.data())
def test_forked_requests_survive_preemption(requests: list[Request], data: st.DataObject) -> None:
    """n > 1, beams and single requests on a tight pool give what each gives alone."""
    mixed = []
    for index, request in enumerate(requests):
        kind = data.draw(st.sampled_from(["single", "n", "beam"]))
        extra: dict[str, Any] = {"max_tokens": request.params.max_tokens}
        if kind == "n":
            extra |= {"n": 2, "temperature": 1.0, "seed": index}
        elif kind == "beam":
            extra |= {"beam_width": 3, "n": 2, "ignore_eos": False}
        mixed.append(request_of(request.id, request.prompt, request.priority, **extra))
    size = data.draw(st.sampled_from([1, 3, 4]))
    preemption = data.draw(st.sampled_from(["recompute", "swap"]))

    def bound(request: Request) -> int:
        shared = request.prompt.num_tokens // size
        total = -(-(request.prompt.num_tokens + request.params.max_tokens) // size)
        return shared + max(request.params.n, request.params.beam_width) * (total - shared)

    num_blocks = max(bound(request) for request in mixed) + data.draw(st.integers(0, 3))
    crowd = Harness(num_blocks=num_blocks, block_size=size, preemption=preemption, max_step_tokens=8)
    for request in mixed:
        crowd.submit(request)
    crowd.run()
    crowd.assert_clean()
    for request in mixed:
        alone = Harness(num_blocks=512, block_size=size)
        alone.submit(request)
        alone.run()
        for choice in range(request.params.n):
            assert crowd.answer(request.id, choice) == alone.answer(request.id, choice)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_beams_catch_up_together_after_preemption(preemption: str) -> None:
    """Each beam recomputes its own tail in small chunks; ranking goes on when all have caught up."""
    prompts = {f"b{i}": prompt_of([i, 1, 2, 3, 4], ("A", 4)) for i in range(2)}
    harness = Harness(
        num_blocks=15,
        block_size=3,
        max_step_tokens=4,
        preemption=preemption,
        prefix_cache=False,
        max_running=6,
    )
    alone = Harness(num_blocks=64)
    for name, prompt in prompts.items():
        for one in (harness, alone):
            one.submit(request_of(name, prompt, beam_width=3, n=3, max_tokens=12))
    harness.run()
    alone.run()
    harness.assert_clean()
    stats = harness.engine.stats()
    assert (stats.preempted_swap if preemption == "swap" else stats.preempted_recompute) > 0
    assert harness.answers == alone.answers
