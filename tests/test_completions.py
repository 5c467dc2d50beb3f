"""OpenAI's own client on /v1/completions: texts that go on as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fake_engine_client import FakeEngine, LiveServer, live_server, model_spec

from vlm.config import ServeConfig

MODEL = "vlm-default"
ADDRESS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(answer="and so on."), ServeConfig(max_queued=8)) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def test_a_text_goes_on_without_a_template(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once<|im_end|>", temperature=0.5, seed=3)
    request = server.engine.submitted[-1]
    assert request.prompt.token_ids == tuple(model_spec().tokenizer.encode("Once<|im_end|>"))
    assert not request.params.drop_leading_space and request.params.temperature == 0.5
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert choice.text == "and so on." and choice.finish_reason == "stop" and choice.logprobs is None
    assert answer.usage is not None and answer.usage.prompt_tokens == request.prompt.num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_its_choices(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["One", "Two", "Three"], "n": 2, "echo": True}
    texts = [""] * 6
    reasons: dict[int, str | None] = {}
    if stream:
        usage = None
        for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    else:
        answer = client.completions.create(**asked)
        usage = answer.usage
        for choice in answer.choices:
            texts[choice.index], reasons[choice.index] = choice.text, choice.finish_reason
    assert texts == [f"{prompt}and so on." for prompt in ("One", "One", "Two", "Two", "Three", "Three")]
    assert set(reasons.values()) == {"stop"} and len(reasons) == 6
    tokens = [len(model_spec().tokenizer.encode(text)) for text in ("One", "Two", "Three")]
    assert usage is not None and usage.prompt_tokens == sum(tokens)


def test_tokens_are_prompts_too(client: openai.OpenAI, server: LiveServer) -> None:
    client.completions.create(model=MODEL, prompt=[5, 6, 7])
    assert server.engine.submitted[-1].prompt.token_ids == (5, 6, 7)
    answer = client.completions.create(model=MODEL, prompt=[[5, 6], [7]])
    assert [r.prompt.token_ids for r in server.engine.submitted[-2:]] == [(5, 6), (7,)]
    assert len(answer.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_of_the_tokens_of_the_text(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "logprobs": 2}
    if stream:
        told = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True)]
    else:
        told = [client.completions.create(**asked).choices[0].logprobs]
    found = [entry for entry in told if entry is not None]
    tokens = [token for entry in found for token in entry.tokens or ()]
    offsets = [offset for entry in found for offset in entry.text_offset or ()]
    assert "".join(tokens) == "and so on."
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert all(len(top) <= 2 for entry in found for top in entry.top_logprobs or ())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": "x " * 400_000}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"messages": []}, "messages"),
        ({"n": 100}, "n"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    server: LiveServer, change: dict[str, Any], param: str
) -> None:
    answered = httpx.post(server.url + ADDRESS, json={"prompt": "Hi", **change})
    assert answered.status_code in (400, 404), answered.text
    assert answered.json()["error"]["param"] == param


def test_prompts_that_find_no_place_leave_none_taken(server: LiveServer) -> None:
    answered = httpx.post(server.url + ADDRESS, json={"prompt": ["Hi"] * 20})
    assert answered.status_code == 429
    assert server.service.admission.num_waiting() == 0
    assert httpx.post(server.url + ADDRESS, json={"prompt": "Hi"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_ends_all_and_cancels_the_rest(server: LiveServer, stream: bool) -> None:
    server.engine.fail_with = ("engine_died", "The engine stopped.")
    try:
        told = httpx.post(server.url + ADDRESS, json={"prompt": ["a", "b"], "stream": stream})
    finally:
        server.engine.fail_with = None
    assert "engine_died" in told.text and told.status_code == (200 if stream else 503)
    assert not server.engine.running


def test_an_answer_is_as_it_is_documented(server: LiveServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/TextCompletion", "components": document["components"]}
    answered = httpx.post(server.url + ADDRESS, json={"prompt": "Hi", "logprobs": 1})
    jsonschema.validate(answered.json(), schema)
