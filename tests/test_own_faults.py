"""What a request's own settings raise ends that request, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, Harness, text_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from llm.backend.base import StepItem
from llm.request import Delta, Failed, Finished, Request, RequestError, SamplingParams
from llm.sampling.sampler import SamplerState
from llm.text.outputs import TextStream
from vlm.build import engine_command
from vlm.config import DEFAULT_MODEL, EngineOptions, ServeConfig
from vlm.pipeline import ChatMessage, Pipeline
from vlm.requests.errors import ApiError
from vlm.requests.params import check_supported, sampling_params
from vlm.requests.schemas import ChatRequest
from vlm.spec import ModelSpec
from workers.contract.faults import OURS, TRANSIENT
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_inline import InlinePreprocess

WAYS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.5},
    {"temperature": 0.5, "seed": 1},
    {"n": 3, "temperature": 1.0, "seed": 2},
    {"beam_width": 3},
    {},
)
CULPRIT = 29  # first token of the prompts to blame
STOP = ("culprit",)  # and their stop string


def sampler_raises(patch: pytest.MonkeyPatch) -> None:
    process = SamplerState.process

    def failing(self: SamplerState, *arguments: Any) -> np.ndarray:
        if self.params.stop == STOP:
            raise ZeroDivisionError
        return process(self, *arguments)

    patch.setattr(SamplerState, "process", failing)


def text_raises(patch: pytest.MonkeyPatch) -> None:
    push = TextStream.push

    def failing(self: TextStream, token_id: int) -> tuple[str, bool]:
        if self._stops is not None:
            raise UnicodeError
        return push(self, token_id)

    patch.setattr(TextStream, "push", failing)


def model_gives_no_numbers(patch: pytest.MonkeyPatch) -> None:
    run = FakeBackend._run

    def failing(self: FakeBackend, item: StepItem) -> list[np.ndarray]:
        rows = run(self, item)
        if item.start == 0 and item.token_ids[0] == CULPRIT:
            for row in rows:
                row[3] = np.nan if item.block_table[0] % 2 else np.inf
        return rows

    patch.setattr(FakeBackend, "_run", failing)


@pytest.mark.parametrize(
    ("fault", "params"),
    [
        (fault, params)
        for fault in (sampler_raises, text_raises, model_gives_no_numbers)
        for params in WAYS
        if params or fault is not sampler_raises  # plain greedy has nothing to process
    ],
)
def test_whatever_is_raised_on_the_way_to_a_token_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], params: dict[str, Any]
) -> None:
    def run(culprits: int) -> Harness:
        harness = Harness(max_running=32, speculation="ngram")
        for i, way in enumerate(WAYS):
            harness.submit(Request(f"r{i}", text_prompt(1, 2, i), SamplingParams(max_tokens=9, **way)))
        for i in range(culprits):
            asked = SamplingParams(max_tokens=9, stop=STOP, **params)
            harness.submit(Request(f"bad{i}", text_prompt(CULPRIT, 6), asked))
        harness.run()
        harness.assert_clean()
        return harness

    alone = run(0)
    fault(monkeypatch)
    together = run(3)
    assert {failed.code for failed in together.failed.values()} == {"internal_error"}
    assert together.failed.keys() == {"bad0", "bad1", "bad2"}
    told = {key: answer for key, answer in together.answers.items() if key[0].startswith("r")}
    assert told == alone.answers and together.finished.keys() == alone.finished.keys()


def test_what_is_raised_while_a_request_is_taken_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    with monkeypatch.context() as patch:
        patch.setattr(SamplerState, "__init__", lambda *_: 1 / 0)
        with pytest.raises(RequestError, match="failed while it worked"):
            harness.submit(Request("r", text_prompt(1), SamplingParams(9)))
    harness.submit(Request("r", text_prompt(1), SamplingParams(9)))
    harness.run()
    harness.assert_clean()


@given(
    st.sampled_from([0.0, 5e-324, 1e-46, 1e-45, 1e-38, 1e-6, 1.0, 1e6, 1e38, 1e300]),
    st.sampled_from([5e-324, 1e-45, 1e-38, 0.5, 1.0, 10.0, 1e38, 1e39, 1e300]),
    st.sampled_from([5e-324, 1e-45, 0.5, 1.0]),
    st.sampled_from([-2.0, 0.0, 2.0]),
    st.sampled_from([0, 1, 31, 32, 10**6]),
)
def test_extreme_settings_still_make_a_distribution(
    temperature: float, penalty: float, share: float, presence: float, top_k: int
) -> None:
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=penalty,
        top_p=share,
        min_p=1.0 - share,
        presence_penalty=presence,
        frequency_penalty=presence,
        top_k=top_k,
        logit_bias=((3, 100.0), (4, -100.0)),
    )
    row = np.linspace(-30, 30, 32, dtype=np.float32)
    sampler = SamplerState(params, (0, 16, 31), 32, 0)
    sampler.observe(5)
    assert np.isfinite(sampler.process(row)).all()
    ids, probabilities = sampler.distribution(row)
    assert len(ids) and np.isfinite(probabilities).all() and np.isclose(probabilities.sum(), 1)
    assert 0 <= sampler.sample(row, 0) < 32


# Of every number that a client may set: within the schema, at its ends, and beyond.
EXTREMES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2, 10**6, 0, 2**63),
    "max_completion_tokens": (1, 10**6, -1),
    "temperature": (0, 5e-324, 1e-45, 1e-6, 2, 2.0000001),
    "top_p": (5e-324, 1e-45, 1 - 2**-53, 1, 0),
    "top_k": (0, 1, 625, 626, 627, 10**6),
    "min_p": (0, 5e-324, 1e-45, 1, 1.1),
    "repetition_penalty": (5e-324, 1e-46, 1e-45, 1e-38, 0.1, 1, 10, 0),
    "presence_penalty": (-2, 2, 5e-324, -2.1),
    "frequency_penalty": (-2, 2, 1e-45, 3),
    "seed": (-(2**63), 2**63 - 1, 0, -1, 2**63),
    "n": (1, 2, 8, 9, 128, 0),
    "best_of": (1, 8, 128),
    "beam_width": (1, 2, 8, 9, 128),
    "use_beam_search": (True,),
    "top_logprobs": (0, 20, 21),
    "logprobs": (True,),
    "ignore_eos": (True,),
    "logit_bias": (
        {"0": 100},
        {"625": -100, "3": 100},
        {"626": 1},
        {"999999999": 1},
        {str(i): -100 for i in range(626)},
        {str(i): 100 for i in range(626)},
    ),
    "stop": ("a", " ", ["x" * 256, "e", "\U0010ffff", "\0"], ""),
    "response_format": (
        {"type": "regex", "regex": "[0-9]{1,99}"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "(a|b)*a(a|b){30}c"},
        {"type": "grammar", "grammar": 'start: "a" start | "b"'},
        {"type": "json_schema", "json_schema": {"schema": {"minimum": 1e308, "type": "number"}}},
        {"type": "json_object"},
    ),
    "service_tier": ("flex",),
}
OPTIONS = EngineOptions(kv_cache_mb=32)
PLAIN = {"max_tokens": 6}


class Service:
    """The engine in its process, asked as the routes ask it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._engine = EngineProcess(engine_command(OPTIONS))
        self._pipeline = Pipeline(ModelSpec.load(DEFAULT_MODEL), InlinePreprocess(), self._engine)
        self._names = map("r{}".format, itertools.count())
        runner.run(self._pipeline.start())
        self._pid = self._engine.pid
        self._expected, _ = runner.run(self._ask(PLAIN))

    def close(self) -> None:
        self._runner.run(self._pipeline.close())

    def check(self, body: dict[str, Any]) -> None:
        """A request of these settings ends with answers or an error that is its own; one beside it is
        answered as ever, by the same process."""

        async def both() -> None:
            (_, end), (text, _) = await asyncio.gather(self._ask(body), self._ask(PLAIN))
            assert text == self._expected != ""
            if isinstance(end, Failed):
                assert end.code not in OURS | TRANSIENT and end.message, end
            assert self._engine.pid == self._pid and self._engine.restarts == 0

        self._runner.run(both())

    async def _ask(self, body: dict[str, Any]) -> tuple[str, object]:
        """(first choice's text, how it ended). Leaves what is long."""
        try:
            asked = ChatRequest.model_validate(
                PLAIN | body | {"messages": [{"role": "user", "content": "Hi"}]}
            )
            check_supported(asked)
            params = sampling_params(asked, ServeConfig())
        except (ValidationError, ApiError) as refusal:
            return "", refusal
        prepared = self._pipeline.prepare(next(self._names), [ChatMessage("user", ("Is it red?",))], params)
        text, ended = "", 0
        events = self._pipeline.run(prepared)
        try:
            async for event in events:
                match event:
                    case Delta(choice=0):
                        text += event.text
                    case Failed():
                        return text, event
                    case Finished():
                        ended += 1
                if len(text) > 40:
                    return text, None
        except RequestError as refusal:
            return text, refusal
        finally:
            await events.aclose()
        assert ended == params.n
        return text, None


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with asyncio.Runner() as runner:
        made = Service(runner)
        yield made
        made.close()


@pytest.mark.parametrize("beside", [{}, {"beam_width": 8}, {"n": 8, "temperature": 2}])
def test_the_engine_outlives_every_extreme_of_every_number(service: Service, beside: dict[str, Any]) -> None:
    for name, values in EXTREMES.items():
        for value in values:
            service.check({**beside, name: value})


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(v) for name, v in EXTREMES.items()}))
def test_the_engine_outlives_extremes_combined(service: Service, body: dict[str, Any]) -> None:
    service.check(body)
