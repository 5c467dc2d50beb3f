"""n > 1, beams, seeds, stop strings and log-probabilities, as the engine delivers them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_backend import (
    EOS,
    VOCAB,
    Answer,
    ByteTokens,
    Harness,
    greedy,
    prompt_of,
    reference_logits,
    request_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Prompt, PromptLogprobs, Request
from llm.sampling.sampler import SamplerState, log_softmax, token_logprob

PROMPT = prompt_of([1, 2, 3], ("A", 7), [4, 5, 6, 7])  # 14 tokens: 3 full blocks of 4 and a part


def run(*requests: Request, **setup: Any) -> Harness:
    harness = Harness(**setup)
    for request in requests:
        harness.submit(request)
    harness.run()
    harness.assert_clean()
    return harness


def sampled(request: Request, choice: int) -> list[int]:
    """The plain reference: recompute everything, draw with the choice's own numbers."""
    ids = list(request.prompt.token_ids)
    sampler = SamplerState(request.params, request.prompt.token_ids, VOCAB, request.params.seed or 0, choice)
    for position in range(request.params.max_tokens):
        ids.append(sampler.sample(reference_logits(request.prompt, ids)[-1], position))
        sampler.observe(ids[-1])
        if ids[-1] == EOS and not request.params.ignore_eos:
            break
    return ids[request.prompt.num_tokens :]


SAMPLERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(SAMPLERS, st.integers(1, 3)), min_size=1, max_size=4))
def test_every_choice_equals_a_separate_run_alone_or_in_a_crowd(
    wanted: list[tuple[dict[str, Any], int]],
) -> None:
    requests = [
        request_of(f"r{i}", PROMPT, n=n, max_tokens=7, ignore_eos=False, **params)
        for i, (params, n) in enumerate(wanted)
    ]
    crowd = run(*requests, max_step_tokens=9, max_running=5)
    for request in requests:
        for choice in range(request.params.n):
            assert crowd.answer(request.id, choice).token_ids == sampled(request, choice)


def test_choices_share_the_prompts_blocks() -> None:
    harness = Harness(num_blocks=64)
    harness.submit(request_of("r", PROMPT, n=4, temperature=1.0, seed=1, max_tokens=10))
    while ("r", 0) not in harness.answers:
        harness.step()
    harness.step()
    # 3 shared full blocks, and one partly filled block for each choice.
    assert harness.engine.stats().kv_blocks_held == 3 + 4
    assert sum(len(plan.copies) for plan in harness.backend.plans) == 3
    harness.run()
    assert harness.backend.num_tokens == 14 + 4 * 9  # the prompt once
    usage = harness.finished["r"].usage
    assert usage is not None and usage.completion_tokens == 40
    harness.assert_clean()


def test_no_block_is_copied_when_the_prompt_fills_its_blocks() -> None:
    harness = run(request_of("r", prompt_of([1] * 8), n=3, temperature=1.0, seed=1))
    assert not any(plan.copies for plan in harness.backend.plans)


def test_the_last_choice_left_writes_in_place() -> None:
    """One choice ends with its first token: the other is the only holder of the partly filled block."""
    request = request_of("r", PROMPT, n=2, temperature=1.0, seed=0, max_tokens=9, ignore_eos=False)
    first, second = (sampled(request, choice)[0] for choice in (0, 1))
    assert first != second
    harness = run(request, eos=frozenset({first}))
    assert harness.answer("r", 0).token_ids == [first]
    assert len(harness.answer("r", 1).token_ids) > 3
    assert not any(plan.copies for plan in harness.backend.plans)


def reference_beams(prompt: Prompt, width: int, max_tokens: int, eos: int) -> list[tuple[list[int], float]]:
    """Beam search on whole token lists, everything recomputed: (tokens, score per token), best first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        options = []
        for tokens, score in live:
            row = log_softmax(reference_logits(prompt, [*prompt.token_ids, *tokens])[-1])
            options += [([*tokens, token], score + float(row[token])) for token in range(VOCAB)]
        options = sorted(options, key=lambda option: -option[1])[: 2 * width]
        done += [(t, s / length) for t, s in options[:width] if t[-1] == eos]
        done = sorted(done, key=lambda item: -item[1])[:width]
        live = [(t, s) for t, s in options if t[-1] != eos][:width]
        if length == max_tokens:
            done = sorted(done + [(t, s / length) for t, s in live], key=lambda item: -item[1])[:width]
        elif len(done) == width and live[0][1] / length <= done[-1][1]:
            break
    return done


@pytest.mark.parametrize("eos", [EOS, 3, 17])
@settings(max_examples=12, deadline=None)
@given(st.integers(2, 4), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_beam_search_equals_the_plain_reference(
    eos: int, width: int, max_tokens: int, text: list[int]
) -> None:
    prompt = prompt_of(text, ("A", 3), text)
    request = request_of(
        "b", prompt, beam_width=width, n=width, max_tokens=max_tokens, ignore_eos=False, logprobs=0
    )
    harness = run(
        request, request_of("other", prompt, max_tokens=5), eos=frozenset({eos}), max_step_tokens=16
    )
    wanted = reference_beams(prompt, width, max_tokens, eos)
    for choice, (tokens, score) in enumerate(wanted):
        answer = harness.answer("b", choice)
        assert answer.token_ids == tokens
        assert np.isclose(np.mean([entry.logprob for entry in answer.logprobs]), score)
        assert answer.reason == ("stop" if tokens[-1] == eos else "length")


def test_beams_share_the_prompts_blocks() -> None:
    harness = Harness(num_blocks=64)
    harness.submit(request_of("b", PROMPT, beam_width=4, max_tokens=8))
    most = 0
    while not harness.engine.is_idle:
        harness.step()
        most = max(most, harness.engine.stats().kv_blocks_held)
    assert most <= 3 + 4 * 3  # full prompt blocks once; positions 12 to 21 of each beam: 3 blocks
    assert harness.backend.num_tokens == 14 + 4 * 7
    harness.assert_clean()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_a_seed_reproduces_alone_and_in_a_crowd(seed: int, others: list[int]) -> None:
    request = request_of("r", PROMPT, temperature=1.0, seed=seed)
    alone = run(request).answer("r")
    crowd = [request_of(f"o{i}", prompt_of([o % 30]), temperature=1.0) for i, o in enumerate(others)]
    assert run(*crowd, request, max_step_tokens=5).answer("r") == alone


def test_without_a_seed_two_runs_differ() -> None:
    request = request_of("r", PROMPT, temperature=2.0, max_tokens=40)
    assert run(request).answer("r") != run(request).answer("r")  # equal once in 10^50


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 11), st.integers(1, 3), st.sampled_from([1, 7, 64]))
def test_a_stop_string_ends_the_text_before_it(at: int, length: int, chunk: int) -> None:
    full = ByteTokens().text(greedy(PROMPT, 14))
    stop = full[at : at + length]
    harness = run(request_of("r", PROMPT, max_tokens=14, stop=("~~~", stop)), max_step_tokens=chunk)
    answer = harness.answer("r")
    assert answer.text == full[: full.index(stop)] and answer.reason == "stop"
    usage = harness.finished["r"].usage
    assert usage is not None and usage.completion_tokens == full.index(stop) + length


def test_an_end_token_counts_but_is_not_shown() -> None:
    ids = greedy(PROMPT, 12)
    eos = ids[5]
    end = ids.index(eos)
    harness = run(request_of("r", PROMPT, max_tokens=12, ignore_eos=False), eos=frozenset({eos}))
    answer = harness.answer("r")
    assert (answer.token_ids, answer.reason) == (ids[: end + 1], "stop")
    assert answer.text == ByteTokens().text(ids[:end])
    usage = harness.finished["r"].usage
    assert usage is not None and usage.completion_tokens == end + 1


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    request = request_of("r", PROMPT, temperature=0.5, seed=3, logprobs=4, logit_bias=((2, 50.0),))
    answer = run(request, request_of("o", prompt_of([1]))).answer("r")
    ids = [*PROMPT.token_ids, *answer.token_ids]
    rows = reference_logits(PROMPT, ids[:-1])[PROMPT.num_tokens - 1 :]
    wanted = [token_logprob(row, token, 4) for row, token in zip(rows, answer.token_ids, strict=True)]
    assert answer.logprobs == wanted


@pytest.mark.parametrize("setup", [{"max_logit_rows": 3}, {"max_step_tokens": 5}, {"num_blocks": 9}])
def test_prompt_logprobs_are_told_once_for_every_position(setup: dict[str, Any]) -> None:
    """Also when the prompt is in the cache, when rows are budgeted, and on a tight pool."""
    harness = Harness(**setup)
    harness.submit(request_of("warm", PROMPT))
    harness.run()
    for i in range(2):
        harness.submit(request_of(f"r{i}", PROMPT, prompt_logprobs=2, max_tokens=16))
    harness.run()
    rows = reference_logits(PROMPT, list(PROMPT.token_ids))
    wanted = [token_logprob(rows[i], PROMPT.token_ids[i + 1], 2) for i in range(PROMPT.num_tokens - 1)]
    for i in range(2):
        told = [e for e in harness.events if isinstance(e, PromptLogprobs) and e.request_id == f"r{i}"]
        assert [entry for event in told for entry in event.logprobs] == wanted
        assert harness.answer(f"r{i}").token_ids == greedy(PROMPT, 16)
    limit = setup.get("max_logit_rows", 256)
    assert all(
        sum(i.num_logits for i in plan.items if i.num_logits > 1) <= limit for plan in harness.backend.plans
    )


def test_prompt_logprobs_are_not_told_again_after_preemption() -> None:
    harness = Harness(max_running=1, max_logit_rows=3, preemption="recompute")
    harness.submit(request_of("scored", PROMPT, "batch", prompt_logprobs=0))
    for _ in range(3):
        harness.step()
    harness.submit(request_of("now", prompt_of([1, 2])))
    harness.run()
    assert harness.engine.stats().preempted_recompute == 1
    told = [e.logprobs for e in harness.events if isinstance(e, PromptLogprobs)]
    rows = reference_logits(PROMPT, list(PROMPT.token_ids))
    wanted = [token_logprob(rows[i], PROMPT.token_ids[i + 1], 0) for i in range(PROMPT.num_tokens - 1)]
    assert [entry for part in told for entry in part] == wanted


def test_streamed_pieces_add_up_to_the_whole() -> None:
    """Bytes as tokens: no piece shows half a character, and the sum is the whole text."""
    table = tuple("€é"[i % 2].encode()[i // 2 % 3 : i // 2 % 3 + 1] or b"x" for i in range(VOCAB))
    tokens = ByteTokens(table)
    harness = run(request_of("r", PROMPT, max_tokens=40), tokens=tokens)
    answer: Answer = harness.answer("r")
    assert answer.text == tokens.text(answer.token_ids)
