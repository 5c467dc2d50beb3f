"""Chat completions as the official client sees them, from a live server whose engine answers at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, data_uri, image_part, live_server, model_spec, png

from vlm.config import ServeConfig

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.fixture
def official(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def num_tiles(width: int, height: int) -> int:
    return model_spec().preprocess.rule.grid(width, height).num_tiles


def test_official_client_gets_an_answer_about_an_image(official: openai.OpenAI) -> None:
    made = official.chat.completions.create(model="vlm-default", **ask(png(300, 200), "How many?"))
    assert made.object == "chat.completion" and made.id.startswith("chatcmpl-")
    (choice,) = made.choices
    tiles = num_tiles(300, 200)
    assert choice.message.role == "assistant"
    assert choice.message.content == f"I saw 1 images in {tiles} tiles."
    assert choice.finish_reason == "stop" and choice.message.refusal is None
    usage = made.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    extra = usage.prompt_tokens_details.model_dump()
    assert extra["image_tokens"] == tiles * model_spec().geometry.tokens_per_tile
    assert extra["image_tokens"] + extra["text_tokens"] == usage.prompt_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_official_client_streams_the_same_answer(official: openai.OpenAI) -> None:
    body = ask(png(300, 200), png(10, 10), "How many?")
    plain = official.chat.completions.create(model="vlm-default", **body)
    chunks = list(
        official.chat.completions.create(
            model="vlm-default", stream=True, stream_options={"include_usage": True}, **body
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    tiles = num_tiles(300, 200) + num_tiles(10, 10)
    assert text == plain.choices[0].message.content == f"I saw 2 images in {tiles} tiles."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]


def test_usage_comes_once_when_asked_for_and_is_null_before(client: httpx.Client) -> None:
    """users.md API facts: with include_usage every chunk has usage null but the last."""
    body = ask("Hello", stream=True, stream_options={"include_usage": True})
    got = events(client.post(CHAT, json=body))
    assert got[-1] == "[DONE]"
    assert all(chunk["usage"] is None for chunk in got[:-2])
    assert got[-2]["choices"] == [] and got[-2]["usage"]["total_tokens"] > 0
    without = events(client.post(CHAT, json=ask("Hello", stream=True)))
    assert all("usage" not in chunk for chunk in without[:-1]) and without[-1] == "[DONE]"


def test_cached_and_image_tokens_are_always_there_and_equal_the_metrics(server: LiveServer) -> None:
    """P11: 0 and not null, equal in stream and non-stream, equal to the metrics' delta."""

    def counters(http: httpx.Client) -> dict[str, float]:
        lines = [line.split() for line in http.get("/metrics").text.splitlines() if line.startswith("vlm_")]
        return {name: float(value) for name, value in lines}

    with server.client() as http:
        body = ask(png(77, 55), "A question nobody asked before")
        before = counters(http)
        cold = http.post(CHAT, json=body).json()["usage"]
        after_cold = counters(http)
        warm_stream = events(
            http.post(CHAT, json=body | {"stream": True, "stream_options": {"include_usage": True}})
        )
        warm = http.post(CHAT, json=body).json()["usage"]
        after = counters(http)
    details = cold["prompt_tokens_details"]
    assert details["image_tokens"] > 0 and isinstance(details["cached_tokens"], int)
    assert warm_stream[-2]["usage"] == warm
    assert warm["prompt_tokens_details"]["cached_tokens"] == warm["prompt_tokens"] - 1
    hits, queries = "vlm_prefix_cache_hits_total", "vlm_prefix_cache_queries_total"
    assert after_cold[hits] - before[hits] == details["cached_tokens"]
    assert after[hits] - after_cold[hits] == 2 * warm["prompt_tokens_details"]["cached_tokens"]
    assert after[queries] - before[queries] == 3 * cold["prompt_tokens"]


def test_n_choices_have_their_own_streams(client: httpx.Client) -> None:
    plain = client.post(CHAT, json=ask("Hi", n=3)).json()
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    got = events(client.post(CHAT, json=ask("Hi", n=3, stream=True)))[:-1]
    texts = ["", "", ""]
    for chunk in got:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in plain["choices"]]
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in got) == 3


def test_logprobs_tell_tokens_bytes_and_alternatives(official: openai.OpenAI) -> None:
    made = official.chat.completions.create(
        model="vlm-default", logprobs=True, top_logprobs=2, **ask("Tell me")
    )
    content = made.choices[0].logprobs and made.choices[0].logprobs.content
    assert content and len(content) == made.usage.completion_tokens  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == made.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert official.chat.completions.create(model="vlm-default", **ask("Hi")).choices[0].logprobs is None


def test_streamed_logprobs_equal_plain_ones(client: httpx.Client) -> None:
    body = ask("Tell me", logprobs=True, top_logprobs=1)
    plain = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    got = events(client.post(CHAT, json=body | {"stream": True}))[:-1]
    streamed = [
        entry for chunk in got for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == plain


def test_settings_reach_the_engine(server: LiveServer, client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = ask(
        "Hi",
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop=["x", "y"],
        seed=-3,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={"5": -100},
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.2,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        service_tier="flex",
        user="someone",
        metadata={"a": "b"},
        store=True,
    )
    answered = client.post(CHAT, json=body)
    assert answered.status_code == 200 and answered.json()["service_tier"] == "flex"
    request = server.engine.submitted[-1]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.9, -3)
    assert params.stop == ("x", "y") and params.logit_bias == ((5, -100.0),)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (4, 0.1, 1.2)
    assert params.constraint is not None
    assert params.constraint[0] == "json_schema" and json.loads(params.constraint[1]) == schema
    assert request.priority == "batch"


@pytest.mark.parametrize("tier", ["auto", "default", "priority", None])
def test_ordinary_tiers_are_interactive(server: LiveServer, client: httpx.Client, tier: str | None) -> None:
    assert client.post(CHAT, json=ask("Hi", service_tier=tier)).status_code == 200
    assert server.engine.submitted[-1].priority == "interactive"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_what_would_change_the_meaning_is_refused(
    client: httpx.Client, settings: dict[str, Any], param: str
) -> None:
    answered = client.post(CHAT, json=ask("Hi", **settings))
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == param
    assert answered.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({}, 1),
        ({"beam_width": 4}, 4),
        ({"use_beam_search": True, "n": 3}, 3),
        ({"use_beam_search": True, "n": 2, "beam_width": 5}, 5),
        ({"use_beam_search": False, "n": 2, "best_of": 2}, 1),
    ],
)
def test_beam_search_is_asked_for_by_its_usual_names(
    server: LiveServer, client: httpx.Client, settings: dict[str, Any], width: int
) -> None:
    assert client.post(CHAT, json=ask("Hi", **settings)).status_code == 200
    assert server.engine.submitted[-1].params.beam_width == width


def test_too_many_stop_strings_are_told_as_such(client: httpx.Client) -> None:
    message = client.post(CHAT, json=ask("Hi", stop=["a"] * 5)).json()["error"]["message"]
    assert "at most 4" in message


@pytest.mark.parametrize("settings", [{"tools": []}, {"tool_choice": "none"}, {"modalities": ["text"]}])
def test_empty_forms_of_unsupported_settings_pass(client: httpx.Client, settings: dict[str, Any]) -> None:
    assert client.post(CHAT, json=ask("Hi", **settings)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"n": 129}, "n"),
        ({"n": 100}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"beam_width": 100}, "beam_width"),
        ({"beam_width": 0}, "beam_width"),
        ({"stop": "x" * 300}, "stop"),
        ({"temperature": 2.5}, "temperature"),
        ({"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias"),
        ({"logit_bias": {"x": 0}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_caps_and_ranges_name_the_parameter(
    client: httpx.Client, settings: dict[str, Any], param: str
) -> None:
    """users.md advisories: huge n, max_tokens, top_logprobs, stop lists end at the schema."""
    answered = client.post(CHAT, json=ask("Hi", **settings))
    assert answered.status_code == 400, answered.text
    assert answered.json()["error"]["param"].startswith(param)
    assert answered.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_schema_has_a_size_cap(client: httpx.Client, kind: str) -> None:
    """Advisory grammar bombs: size is capped before anything is compiled."""
    value: Any = "a" * 200_000
    if kind == "json_schema":
        value = {"name": "a", "schema": {"enum": [value]}}
    answered = client.post(CHAT, json=ask("Hi", response_format={"type": kind, kind: value}))
    assert answered.status_code == 400
    assert answered.json()["error"]["param"].startswith(f"response_format.{kind}")


def test_unknown_model_is_404_and_official_error_class(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        official.chat.completions.create(model="gpt-4o", **ask("Hi"))
    assert caught.value.code == "model_not_found" and "'vlm-default'" in caught.value.message


def test_error_in_mid_stream_raises_in_the_official_client() -> None:
    engine = FakeEngine(fail_with=("engine_died", "The engine stopped."))
    with (
        live_server(engine) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as official,
    ):
        stream = official.chat.completions.create(model="vlm-default", stream=True, **ask("Hi"))
        with pytest.raises(openai.APIError, match="engine stopped"):
            for _ in stream:
                pass


def test_failure_before_the_first_token_has_its_own_status() -> None:
    """D7: a truncated image is a 400, also for a stream, though nothing was known from its header."""
    with live_server() as running, running.client() as http:
        data = png(800, 600, (1, 2, 3))
        for stream in (False, True):
            answered = http.post(CHAT, json=ask(data[: len(data) // 2], "What?", stream=stream))
            assert answered.status_code == 400 and answered.headers["content-type"] == "application/json"
            assert answered.json()["error"]["code"] == "invalid_image"


def test_deadline_ends_with_an_error_object() -> None:
    with live_server(FakeEngine(token_delay_s=5)) as running, running.client() as http:
        answered = http.post(CHAT, json=ask("Hi", deadline_s=0.3))
        assert answered.status_code == 503
        assert answered.json()["error"]["code"] == "deadline_exceeded"
        assert int(answered.headers["retry-after"]) >= 1


def test_deadline_in_mid_stream_is_an_error_event() -> None:
    with live_server(FakeEngine(token_delay_s=0.05)) as running, running.client() as http:
        got = events(http.post(CHAT, json=ask("Hi", deadline_s=0.3, stream=True)))
        assert got[0]["choices"][0]["delta"]["role"] == "assistant"
        assert got[-1]["error"]["code"] == "deadline_exceeded"


def test_history_counts_and_roles_map(server: LiveServer, client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [image_part(png()), {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": "Which color?"},
    ]
    answered = client.post(CHAT, json={"messages": messages})
    assert answered.status_code == 200, answered.text
    assert answered.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    text = model_spec().tokenizer.decode(server.engine.submitted[-1].prompt.token_ids, skip_special=False)
    assert "Be brief." in text and "A square." in text


def test_detail_low_is_one_tile_and_part_of_the_key(server: LiveServer, client: httpx.Client) -> None:
    """P12."""
    data = png(900, 1400)
    keys = {}
    for detail in ("low", "high", "auto"):
        body = ask({"type": "image_url", "image_url": {"url": data_uri(data), "detail": detail}}, "What?")
        count = client.post("/v1/tokenize", json=body).json()
        assert client.post(CHAT, json=body).status_code == 200
        keys[detail] = server.engine.submitted[-1].prompt.spans[0].key
        if detail == "low":
            assert count["images"][0]["tiles"] == 1
    assert keys["low"] != keys["high"] == keys["auto"]
    bad = ask({"type": "image_url", "image_url": {"url": data_uri(data), "detail": "huge"}}, "What?")
    answered = client.post(CHAT, json=bad)
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == "messages[0].content[0].image_url.detail"


def test_async_official_client_asks_many_at_once(server: LiveServer) -> None:
    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as official:
            made = await asyncio.gather(
                *(
                    official.chat.completions.create(model="vlm-default", **ask(png(20 + i, 20), "What?"))
                    for i in range(12)
                )
            )
        return [m.choices[0].message.content for m in made]

    assert asyncio.run(run()) == [f"I saw 1 images in {num_tiles(20 + i, 20)} tiles." for i in range(12)]


def test_queue_full_is_429_with_a_time_to_come_back() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    with live_server(engine, ServeConfig(max_queued=2)) as running:

        async def run() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
                waiting = [asyncio.create_task(http.post(CHAT, json=ask("Hi"))) for _ in range(2)]
                while len(engine.running) < 2:
                    await asyncio.sleep(0.01)
                refused = await http.post(CHAT, json=ask("Hi"))
                running.loop.call_soon_threadsafe(engine.hold.set)  # type: ignore[union-attr]
                return [refused, *(await asyncio.gather(*waiting))]

        refused, *answered = asyncio.run(run())
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1 and "x-should-retry" not in refused.headers
    assert [response.status_code for response in answered] == [200, 200]
