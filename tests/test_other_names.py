"""Parameters by the names of other servers mean here what they mean there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_backend import EOS, Harness, prompt_of, request_of
from fake_engine_client import LiveServer, ask, live_server, png
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import RequestError, SamplingParams
from llm.sampling.sampler import check_params
from vlm.config import ServeConfig
from vlm.requests.errors import ApiError
from vlm.requests.params import sampling_params
from vlm.requests.schemas import ChatRequest

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def params_of(**body: Any) -> SamplingParams:
    return sampling_params(ChatRequest.model_validate(ask("Hi", **body)), ServeConfig())


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"guided_json": SCHEMA}, ("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
        ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
        ({"json_schema": SCHEMA}, ("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
        ({"guided_regex": "[a-z]+"}, ("regex", "[a-z]+")),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"guided_choice": ["yes", "no"]}, ("regex", "(yes)|(no)")),
        ({"structured_outputs": {"choice": ["a"]}}, ("regex", "(a)")),
        ({"structured_outputs": {"json_object": True, "regex": None}}, ("json_object", "")),
        ({"guided_json": None, "guided_choice": [], "structured_outputs": {}}, None),
    ],
)
def test_constraints_are_taken_by_every_name(body: dict[str, Any], constraint: object) -> None:
    assert params_of(**body).constraint == constraint


@given(choices=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_a_choice_matches_its_own_texts_alone(choices: list[str]) -> None:
    constraint = params_of(guided_choice=choices).constraint
    assert constraint is not None and constraint[0] == "regex"
    pattern = re.compile(constraint[1])
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not pattern.fullmatch("".join(choices) + "x")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": {"a": 1}}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", 1]}, "guided_choice"),
        ({"structured_outputs": ["a"]}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "json_schema": SCHEMA}, "json_schema"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_wrong_constraints_are_refused_by_their_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        params_of(**body)
    assert refused.value.param == param


def test_lengths_and_probabilities() -> None:
    assert params_of(max_tokens=-1).fit_max_tokens and params_of(max_tokens=-1).max_tokens > 100_000
    assert params_of(min_tokens=5, max_tokens=3).min_tokens == 3
    assert params_of(n_probs=3).logprobs == 3 and params_of(n_probs=0).logprobs is None
    assert params_of(stop_token_ids=[7, 9]).stop_token_ids == (7, 9)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def test_the_original_of_an_image_is_its_high_detail(server: LiveServer, client: httpx.Client) -> None:
    keys = []
    for detail in ("original", "high", "low"):
        body = ask(png(900, 700), "What?")
        body["messages"][0]["content"][0]["image_url"]["detail"] = detail
        assert client.post(CHAT, json=body).status_code == 200
        keys.append(server.engine.submitted[-1].prompt.spans[0].key)
    assert keys[0] == keys[1] != keys[2]


def test_requests_of_other_salts_share_no_cached_work(server: LiveServer, client: httpx.Client) -> None:
    found = []
    for salt in (None, "a", "b", "a"):
        assert client.post(CHAT, json=ask(png(40, 30), "What?", cache_salt=salt)).status_code == 200
        request = server.engine.submitted[-1]
        found.append((request.namespace, request.prompt.spans[0].key))
    assert found[1] == found[3] and len(set(found)) == 3 and len({key for _, key in found}) == 3


def test_a_length_of_nothing_is_refused(client: httpx.Client) -> None:
    answered = client.post(CHAT, json=ask("Hi", max_tokens=0))
    assert answered.status_code == 400 and answered.json()["error"]["param"] == "max_tokens"


def test_beam_search_takes_neither_shortest_length_nor_end_tokens() -> None:
    for field in ({"min_tokens": 2}, {"stop_token_ids": (1,)}):
        with pytest.raises(RequestError, match="beam search"):
            check_params(SamplingParams(beam_width=2, **field), 10)  # type: ignore[arg-type]


PROMPT = prompt_of([1, 2, 3], ("A", 7), [4, 5, 6, 7])


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 5]),
    least=st.integers(0, 20),
    ends=st.sets(st.integers(1, 29), max_size=12),
    speculation=st.sampled_from(["off", "ngram"]),
)
def test_no_end_comes_before_the_shortest_length_and_an_end_token_ends_the_answer(
    seed: int, temperature: float, top_k: int, least: int, ends: set[int], speculation: str
) -> None:
    harness = Harness(speculation=speculation)
    settings_ = {"seed": seed, "temperature": temperature, "top_k": top_k, "ignore_eos": False}
    harness.submit(
        request_of("r", PROMPT, max_tokens=24, min_tokens=least, stop_token_ids=tuple(ends), **settings_)
    )
    harness.run()
    harness.assert_clean()
    answer = harness.answer("r")
    stopping = {EOS, *ends}
    where = [i for i, token in enumerate(answer.token_ids) if token in stopping]
    if answer.reason == "stop":
        assert where == [len(answer.token_ids) - 1] and where[0] >= least
    else:
        assert not where and len(answer.token_ids) == 24
