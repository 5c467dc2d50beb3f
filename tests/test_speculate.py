"""Speculation changes how many steps an answer takes, never the answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from article_formulas import speculation_pays
from fake_backend import VOCAB, Harness, prompt_of, reference_logits, request_of, text_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from test_constrain import EOS_ID, VOCAB_SIZE, VOCABULARY, constrained, harness_of

from llm.constraints.constrain import Grammars
from llm.cost import Machine
from llm.engine_config import EngineConfig
from llm.request import Request, SamplingParams
from llm.sampling.draft import Drafter, NGramDraft
from llm.sampling.sampler import SamplerState
from llm.scheduling.speculate import Speculation
from vlm.bench.harness.engine_load import Driver, document, image_request
from vlm.build import build_runner
from vlm.config import EngineOptions
from vlm.spec import ModelSpec
from workers.children.grammar_process import GrammarProcess

OPTIONS = EngineOptions(kv_cache_mb=64)

PROMPT = prompt_of([1, 2, 3], ("A", 7), [4, 5, 6, 7])


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(VOCABULARY, frozenset({EOS_ID}), VOCAB_SIZE, check=GrammarProcess)
    yield made
    made.close()


class Oracle:
    """Knows the answers and lies every now and then."""

    def __init__(self, known: Sequence[tuple[int, ...]], wrong: float, vocab_size: int) -> None:
        self._known = known
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        for answer in self._known:
            if answer[: len(tokens)] == tuple(tokens):
                right = answer[len(tokens) : len(tokens) + count]
                lies = [self._rng.random() < self._wrong for _ in right]
                return tuple(
                    self._rng.randrange(self._vocab_size) if lie else token_id
                    for token_id, lie in zip(right, lies, strict=True)
                )
        return ()


class Always:
    def __init__(self, *guesses: int) -> None:
        self._guesses = guesses

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        return self._guesses[:count]


def speculate_with(harness: Harness, draft: Drafter, num_draft: int = 4) -> Speculation:
    speculation = Speculation(lambda: draft, num_draft, None)
    harness.engine._scheduler.speculation = speculation
    return speculation


def run(harness: Harness, requests: Sequence[Request]) -> Harness:
    for request in requests:
        harness.submit(request)
    harness.run()
    harness.assert_clean()
    return harness


def known(requests: Sequence[Request], harness: Harness) -> list[tuple[int, ...]]:
    return [
        (*request.prompt.token_ids, *harness.answer(request.id, choice).token_ids)
        for request in requests
        for choice in range(request.params.n)
    ]


SAMPLERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logprobs": st.sampled_from([None, 2]),
        "seed": st.integers(0, 1000),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 24),
        "ignore_eos": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(SAMPLERS, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.integers(1, 6),
    st.sampled_from(["recompute", "swap"]),
    st.sampled_from([26, 40, 128]),
)
def test_answers_are_the_same_with_and_without(
    wanted: list[dict[str, Any]], wrong: float, num_draft: int, preemption: str, num_blocks: int
) -> None:
    requests = [request_of(f"r{i}", PROMPT, **params) for i, params in enumerate(wanted)]
    plain = run(Harness(num_blocks=128), requests)
    guessed = Harness(num_blocks=num_blocks, preemption=preemption, max_step_tokens=9, max_running=5)
    speculation = speculate_with(guessed, Oracle(known(requests, plain), wrong, VOCAB), num_draft)
    run(guessed, requests)
    assert guessed.answers == plain.answers
    assert speculation.num_accepted <= speculation.num_drafted


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from(["recompute", "swap"]),
    st.sampled_from([52, 70, 512]),
)
def test_with_choices_constraints_and_preemption_the_engine_keeps_its_invariants(
    grammars: Grammars, wanted: list[tuple[int, int]], wrong: float, preemption: str, num_blocks: int
) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": ["ab", 7, True]}, "minItems": 2, "maxItems": 6})
    requests = [
        constrained(f"r{i}", "json_schema", schema, seed, n=n, max_tokens=60)
        for i, (n, seed) in enumerate(wanted)
    ]
    requests += [constrained(f"x{i}", "regex", "[a-d]{40}", i, max_tokens=60) for i in range(2)]
    plain = run(harness_of(grammars), requests)
    guessed = harness_of(grammars, preemption=preemption, num_blocks=num_blocks)
    speculate_with(guessed, Oracle(known(requests, plain), wrong, VOCAB_SIZE))
    run(guessed, [replace(r, priority="batch" if r.id[0] == "r" else "interactive") for r in requests])
    assert guessed.answers == plain.answers and not guessed.failed


def test_right_guesses_save_steps_and_wrong_ones_are_given_up() -> None:
    requests = [request_of("r", text_prompt(1, 2, 3), max_tokens=101)]
    plain = run(Harness(), requests)
    right, wrong = Harness(), Harness()
    good = speculate_with(right, Oracle(known(requests, plain), 0.0, VOCAB))
    missing = next(i for i in range(VOCAB) if i not in plain.answer("r").token_ids[:90])
    bad = speculate_with(wrong, Always(*[missing] * 4))
    run(right, requests)
    run(wrong, requests)
    assert right.answers == wrong.answers == plain.answers
    # 1 token with the prompt, then 1 + 1, 1 + 2 and 19 times 1 + 4.
    assert good.num_accepted == good.num_drafted == 1 + 2 + 19 * 4
    assert right.engine.stats().steps == 22
    assert bad.num_accepted == 0 and bad.num_drafted <= 1 + 101 // 17
    assert right.engine.stats().drafted_tokens == right.engine.stats().accepted_tokens == 79


def test_a_step_that_the_rule_finds_too_large_has_no_guesses() -> None:
    machine = Machine("m", peak_flops=1e11, bandwidth=2e10, memory_bytes=1 << 30)  # 5 rows at the ridge
    asked = []

    def pays(batch: int, num_draft: int) -> bool:
        asked.append((batch, num_draft))
        return speculation_pays(batch, num_draft, machine)

    requests = [request_of(f"r{i}", text_prompt(1, 2, 3), max_tokens=20 + 20 * i) for i in range(2)]
    plain = run(Harness(), requests)
    harness = Harness()
    speculation = Speculation(lambda: Oracle(known(requests, plain), 0.0, VOCAB), 3, pays)
    harness.engine._scheduler.speculation = speculation
    run(harness, requests)
    assert (2, 3) in asked and (1, 3) in asked
    assert all(len(plan.items) == 1 for plan in harness.backend.plans if plan.items[0].num_logits > 1)
    assert speculation.num_accepted > 0 and harness.answers == plain.answers


def test_guesses_take_no_blocks_from_anyone() -> None:
    requests = [request_of(f"r{i}", text_prompt(1, 2, i), max_tokens=13) for i in range(4)]
    plain = run(Harness(num_blocks=16), requests)  # exactly what the four need
    harness = Harness(num_blocks=16)
    speculate_with(harness, Oracle(known(requests, plain), 0.5, VOCAB))
    run(harness, requests)
    stats = harness.engine.stats()
    assert stats.preempted_recompute == stats.preempted_swap == 0 and harness.answers == plain.answers


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_an_ngram_draft_continues_the_latest_longest_match(tokens: list[int], count: int) -> None:
    draft = NGramDraft((3, 2))
    for end in range(1, len(tokens) + 1):
        seen = tokens[:end]
        expected: tuple[int, ...] = ()
        for size in (3, 2):
            ends = [e for e in range(size, end) if seen[e - size : e] == seen[-size:]]
            if ends:
                extended = list(seen)
                for i in range(count):
                    extended.append(extended[ends[-1] + i])
                expected = tuple(extended[end:])
                break
        assert draft.propose(seen, count) == expected


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="speculation"):
        EngineConfig(speculation="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_draft"):
        EngineConfig(num_draft=0)
    assert Harness().engine._scheduler.speculation is None


def test_a_repeated_text_is_guessed_from_itself() -> None:
    """An answer held to one word by its bias: every later token is known from the output."""
    bias = tuple((i, 100.0 if i == 5 else -100.0) for i in range(VOCAB))
    request = request_of("r", text_prompt(1), max_tokens=60, logit_bias=bias)
    harness = run(Harness(speculation="ngram", num_draft=4), [request])
    assert harness.answer("r").token_ids == [5] * 60
    assert harness.engine.stats().steps < 20


@pytest.mark.slow
@pytest.mark.parametrize("guess_rank", [0, 1])
def test_the_sampled_distribution_is_unchanged_over_20000_draws(guess_rank: int) -> None:
    """Four tokens with top-k 2: 16 outcomes; 37.7 is exceeded once in 1,000 times with 15 degrees."""
    prompt, num_draws = text_prompt(3, 1, 4), 20_000
    sampler = SamplerState(
        request_of("x", prompt, temperature=1.5, top_k=2).params, prompt.token_ids, VOCAB, 0
    )
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        longer = {}
        for tokens, probability in expected.items():
            ids, probs = sampler.distribution(reference_logits(prompt, [*prompt.token_ids, *tokens])[-1])
            for token_id, p in zip(ids.tolist(), probs.tolist(), strict=True):
                longer[(*tokens, token_id)] = probability * p
        expected = longer

    class Ranked:
        """Guesses the likeliest or the second token of the exact distribution."""

        def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
            done = tuple(tokens[prompt.num_tokens :])
            ways = Counter({t: p for t, p in expected.items() if t[: len(done)] == done}).most_common()
            return ways[min(guess_rank, len(ways) - 1)][0][len(done) : len(done) + count]

    harness = Harness(num_blocks=256, checks=False, max_running=32)
    speculation = speculate_with(harness, Ranked(), 2)
    for seed in range(num_draws):
        harness.submit(request_of(f"r{seed}", prompt, temperature=1.5, top_k=2, seed=seed, max_tokens=4))
        if seed % 32 == 31:
            harness.run()
    harness.run()
    counts = Counter(tuple(answer.token_ids) for answer in harness.answers.values())
    assert sum(counts.values()) == num_draws and counts.keys() <= expected.keys()
    chi_square = sum(
        (counts[tokens] - num_draws * p) ** 2 / (num_draws * p) for tokens, p in expected.items()
    )
    assert chi_square < 37.7
    assert 0 < speculation.num_accepted < speculation.num_drafted


def test_the_default_model_reads_documents_alike_with_and_without() -> None:
    spec = ModelSpec.load(OPTIONS.model)
    answers: dict[str, dict[str, list[int]]] = {}
    for speculation in ("off", "ngram"):
        runner = build_runner(OPTIONS, EngineConfig(speculation=speculation))  # type: ignore[arg-type]
        driver = Driver(spec, runner)
        for number, kind in enumerate(("receipt", "label", "sign", "shapes") * 2):
            warm = 0.7 * (number % 2)
            params = SamplingParams(max_tokens=80, ignore_eos=number > 3, temperature=warm, seed=number)
            asked = image_request(spec, f"r{number}", [document(number, kind)], "Read the text.", params)
            driver.submit(asked.request, asked.images)
        driver.run()
        answers[speculation] = {name: trace.token_ids for name, trace in driver.traces.items()}
        assert (runner.engine.stats().drafted_tokens > 0) == (speculation == "ngram")
    assert answers["off"] == answers["ngram"]
