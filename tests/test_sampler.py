"""Each sampler against a plain reference written with lists and sorted(), on random logits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import RequestError, SamplingParams
from llm.sampling.sampler import SamplerState, check_params, log_softmax, token_logprob, uniform

VOCAB = 24
# Few distinct values, so that ties are common.
ROWS = st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB).map(
    lambda row: np.array(row, np.float32) / np.float32(4)
)


def state(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any) -> SamplerState:
    sampler = SamplerState(SamplingParams(**params), prompt, VOCAB, seed=params.get("seed") or 0)
    for token_id in output:
        sampler.observe(token_id)
    return sampler


def reference_distribution(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if top_k:
        ranked = [i for i in ranked if row[i] >= row[ranked[min(top_k, len(row)) - 1]]]
    weights = {i: math.exp((row[i] - row[ranked[0]]) / temperature) for i in ranked}
    total = sum(weights.values())
    probs = {i: weight / total for i, weight in weights.items()}
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += probs[i]
        if mass >= top_p - 1e-12:
            break
    kept = [i for i in kept if probs[i] >= min_p * probs[ranked[0]] * (1 - 1e-12)]
    total = sum(probs[i] for i in kept)
    return {i: probs[i] / total for i in kept}


@settings(max_examples=200, deadline=None)
@given(
    ROWS,
    st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    st.integers(0, VOCAB + 2),
    st.sampled_from([0.1, 0.503, 0.907, 1.0]),
    st.sampled_from([0.0, 0.053, 0.3, 1.0]),
)
def test_distribution_equals_the_reference(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampler = state(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probs = sampler.distribution(row)
    wanted = reference_distribution([float(x) for x in row], temperature, top_k, top_p, min_p)
    assert sorted(wanted) == ids.tolist()
    assert np.allclose([wanted[int(i)] for i in ids], probs, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    ROWS,
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-1.5, 0.0, 0.5]),
    st.sampled_from([-0.5, 0.0, 1.0]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
)
def test_penalties_and_bias_equal_the_reference(
    row: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    sampler = state(
        (*prompt, 0),
        tuple(output),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    counts = Counter(output)
    wanted = []
    for i, value in enumerate(row.tolist()):
        if i in counts or i in prompt or i == 0:
            value = value / repetition if value > 0 else value * repetition
        value -= counts[i] * frequency + (counts[i] > 0) * presence
        wanted.append(value + bias.get(i, 0.0))
    before = row.copy()
    assert np.allclose(sampler.process(row), wanted, atol=1e-5)
    assert np.array_equal(row, before)


@given(ROWS)
def test_temperature_zero_is_argmax_and_ties_go_to_the_smaller_id(row: np.ndarray) -> None:
    assert state().sample(row, 0) == row.tolist().index(max(row.tolist()))


@given(ROWS, st.integers(0, 2**63), st.integers(0, 50))
def test_top_k_one_is_greedy_up_to_ties(row: np.ndarray, seed: int, position: int) -> None:
    drawn = state(temperature=1.0, top_k=1, seed=seed).sample(row, position)
    assert row[drawn] == row.max()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws, one per position of one seed; 0.1% false alarms were it not fixed."""
    row = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -30.0], np.float32)
    sampler = SamplerState(SamplingParams(temperature=1.0, seed=11), (0,), 6, 11)
    ids, probs = sampler.distribution(row)
    counts = Counter(sampler.sample(row, position) for position in range(20_000))
    expected = {int(i): 20_000 * p for i, p in zip(ids, probs, strict=True) if 20_000 * p > 5}
    chi = sum((counts[i] - count) ** 2 / count for i, count in expected.items())
    assert chi < 18.5  # 4 degrees of freedom


def test_uniform_depends_on_every_argument_and_nothing_else() -> None:
    drawn = {uniform(s, c, p) for s in range(4) for c in range(4) for p in range(4)}
    assert len(drawn) == 4 * 4 * 4 and all(0.0 <= u < 1.0 for u in drawn)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


@given(ROWS, st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_mask_leaves_only_what_it_allows(row: np.ndarray, allowed: set[int]) -> None:
    mask = np.isin(np.arange(VOCAB), list(allowed))
    for sampler in (state(), state(temperature=1.0), state(temperature=1.0, top_k=3, top_p=0.9)):
        assert sampler.sample(row, 0, mask) in allowed


def test_a_fork_goes_its_own_way() -> None:
    first = state(frequency_penalty=1.0, repetition_penalty=2.0)
    second = first.fork(1)
    second.observe(5)
    row = np.ones(VOCAB, np.float32)
    assert first.process(row)[5] == 1.0 and second.process(row)[5] == -0.5
    assert (first.choice, second.choice) == (0, 1)


@given(ROWS, st.integers(0, VOCAB - 1), st.integers(0, 5))
def test_logprobs_equal_the_reference(row: np.ndarray, token_id: int, num_top: int) -> None:
    values = row.astype(float).tolist()
    total = math.log(sum(math.exp(value) for value in values))
    told = token_logprob(row, token_id, num_top)
    assert math.isclose(told.logprob, values[token_id] - total, abs_tol=1e-9)
    ranked = sorted(range(VOCAB), key=lambda i: (-values[i], i))[:num_top]
    assert [i for i, _ in told.top] == ranked
    assert np.isclose(np.exp(log_softmax(row)).sum(), 1.0)


@pytest.mark.parametrize("params", [{"top_p": 0.95}, {"min_p": 0.02}, {"top_p": 0.9999}, {"min_p": 1e-9}])
def test_the_partial_sort_of_a_large_vocabulary_equals_the_full_one(params: dict[str, float]) -> None:
    row = np.random.default_rng(3).normal(0, 3, 20_000).astype(np.float32)
    sampler = SamplerState(SamplingParams(temperature=1.0, **params), (0,), len(row), 0)
    ids, probs = sampler.distribution(row)
    wanted = reference_distribution(row.tolist(), 1.0, 0, params.get("top_p", 1.0), params.get("min_p", 0.0))
    assert set(ids.tolist()) == set(wanted)
    assert np.allclose([wanted[int(i)] for i in ids], probs)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -2.5},
        {"n": 0},
        {"beam_width": 0},
        {"beam_width": 2, "n": 3},
        {"stop": ("",)},
        {"logprobs": -1},
        {"logit_bias": ((VOCAB, 1.0),)},
        {"logit_bias": ((0, 101.0),)},
    ],
)
def test_values_no_sampler_can_honour_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        check_params(SamplingParams(**params), VOCAB)
    assert error.value.code == "invalid_sampling_params"
    assert error.value.param in params
