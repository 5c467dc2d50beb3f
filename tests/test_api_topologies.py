"""The API's suite over the real service, in all three topologies, with equal answers, counts and keys.

Every test of the API's files that reaches its server by HTTP alone runs here against `local`, `celery` and
`cluster`, and what they answer (texts, token counts, image ids, error objects) is held against one another.
Left with the engine that answers at once are tests that look inside it or hold it up, and those of parts
that lie before any engine: fetching, the schema's 2,000 generated cases, admission's clocks, files on disk.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import test_api_chat
import test_api_images_files
import test_api_limits
import test_api_observability
import test_api_openapi
import test_api_security
from direct_cluster import picture
from fake_engine_client import ask, image_part, png
from live_serve import LiveServe, vlm_serve
from topologies import KEY_NAMES, TOPOLOGIES, Answers, over_http, topology, write_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
ANSWERS = Answers()
# These know what the engine that answers at once says, how it ends, and how much of a prompt it finds again.
_KNOW_THE_ENGINE = (
    "test_official_client_gets_an_answer_about_an_image",
    "test_official_client_streams_the_same_answer",
    "test_async_official_client_asks_many_at_once",
    "test_logprobs_tell_tokens_bytes_and_alternatives",
    "test_cached_and_image_tokens_are_always_there_and_equal_the_metrics",
)
globals().update(
    over_http(test_api_chat, {"client", "official", "server"}, _KNOW_THE_ENGINE)
    | over_http(test_api_limits, {"client", "server"})
    | over_http(test_api_images_files, {"client", "server"})
    | over_http(test_api_observability, {"server"})
    | over_http(
        test_api_openapi, {"server", "document"}, ("test_no_generated_request_gets_an_undocumented_answer",)
    )
    | over_http(test_api_security, {"locked"})
)


class Comparing(LiveServe):
    """Its clients note what they are answered."""

    def client(self, **options: Any) -> httpx.Client:
        return super().client(event_hooks=ANSWERS.hooks(), **options)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def _service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServe, dict[str, Any]]]:
    with topology(request.param, tmp_path_factory.mktemp) as made:
        yield made
    print(f"{request.param}: {ANSWERS.num_compared} answers held against another topology's so far")


@pytest.fixture
def server(_service: tuple[LiveServe, dict[str, Any]], request: pytest.FixtureRequest) -> Iterator[LiveServe]:
    live = _service[0]
    where = request.node.callspec.params["_service"]
    ANSWERS.begin()
    yield Comparing(live.process, live.url, live.log)
    ANSWERS.compare(request.node.name.replace(where, "*"), where)


@pytest.fixture(scope="module")
def locked(
    _service: tuple[LiveServe, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServe]:
    """Another API node of the same service, with keys and a short queue."""
    folder = tmp_path_factory.mktemp("locked")
    with vlm_serve(folder, keys_file=write_keys(folder / "keys.toml"), max_queued=2, **_service[1]) as live:
        yield live


@pytest.fixture(scope="module")
def document(_service: tuple[LiveServe, dict[str, Any]]) -> dict[str, Any]:
    with _service[0].client() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.fixture
def client(server: LiveServe) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.fixture
def official(server: LiveServe) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(timeout=120, trust_env=False, event_hooks=ANSWERS.hooks()) as http,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as made,
    ):
        yield made


def streamed(response: httpx.Response) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in test_api_chat.events(response)[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
    return texts


SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {"5": 3, "70": -100}, "temperature": 0.5, "seed": 1},
        {"ignore_eos": True, "max_tokens": 40},
        {"logprobs": True, "top_logprobs": 3},
        {"service_tier": "flex"},
        {"response_format": JSON_SCHEMA},
        {"response_format": {"type": "regex", "regex": "(yes|no), [0-9]{3}"}},
        {"response_format": {"type": "grammar", "grammar": 'start: "yes" | "no" "!"+'}},
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_every_setting_gives_one_answer_streaming_or_not(
    client: httpx.Client, settings: dict[str, Any]
) -> None:
    for seed in range(2):
        body = ask(picture(seed), "What is in the image?", **{"max_tokens": 24, **settings})
        plain = client.post(CHAT, json=body).json()
        texts = {choice["index"]: choice["message"]["content"] for choice in plain["choices"]}
        assert len(texts) == settings.get("n", 1)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert streamed(client.post(CHAT, json=body | options)) == texts
        if settings.get("ignore_eos"):
            assert plain["usage"]["completion_tokens"] == 40


def test_answers_keep_to_their_format(client: httpx.Client) -> None:
    def said(kind: dict[str, Any]) -> str:
        answered = client.post(CHAT, json=ask(picture(0), "What?", max_tokens=60, response_format=kind))
        return str(answered.json()["choices"][0]["message"]["content"])

    value = json.loads(said(JSON_SCHEMA))
    assert value["color"] in ("red", "blue") and value["count"] in range(100)
    assert re.fullmatch("(yes|no), [0-9]{3}", said({"type": "regex", "regex": "(yes|no), [0-9]{3}"}))


def test_an_answer_ends_before_its_stop_string(client: httpx.Client) -> None:
    body = ask(picture(1), "What is in the image?", max_tokens=24)
    whole = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:2]
    for stream in (False, True):
        answered = client.post(CHAT, json=body | {"stop": ["never said", stop], "stream": stream})
        text = streamed(answered)[0] if stream else answered.json()["choices"][0]["message"]["content"]
        assert text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({"response_format": {"type": "regex", "regex": "(unclosed"}}, "invalid_constraint"),
        ({"logit_bias": {"99999999": 1}}, "invalid_sampling_params"),
    ],
    ids=["grammar", "token"],
)
def test_what_only_the_engine_can_refuse_is_a_400_that_names_its_field(
    client: httpx.Client, wish: dict[str, Any], code: str
) -> None:
    for stream in (False, True):
        answered = client.post(CHAT, json=ask(picture(0), "What?", stream=stream, **wish))
        assert answered.status_code == 400, answered.text
        error = answered.json()["error"]
        assert (error["code"], error["param"]) == (code, *wish)


def test_a_conversation_about_images_by_id_goes_on(client: httpx.Client) -> None:
    ids = [client.post("/v1/images", files={"file": picture(seed)}).json()["id"] for seed in (2, 3)]
    first, second = ({"type": "image_url", "image_url": {"url": url}} for url in ids)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
    for content in (
        [first, {"type": "text", "text": "What?"}],
        [second, {"type": "text", "text": "And here?"}],
    ):
        messages.append({"role": "user", "content": content})
        counted = client.post("/v1/tokenize", json={"messages": messages}).json()
        answered = client.post(CHAT, json={"messages": messages, "max_tokens": 24}).json()
        assert answered["usage"]["prompt_tokens"] == counted["prompt_tokens"]
        messages.append({"role": "assistant", "content": answered["choices"][0]["message"]["content"]})
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_image_that_is_cut_off_is_refused_in_every_form(client: httpx.Client) -> None:
    data = png(800, 600, (1, 2, 3))
    for stream in (False, True):
        answered = client.post(CHAT, json=ask(data[: len(data) // 2], "What?", stream=stream))
        assert answered.status_code == 400 and answered.headers["content-type"] == "application/json"
        assert answered.json()["error"]["code"] == "invalid_image"


def test_many_clients_at_once_get_the_answers_of_one(server: LiveServe) -> None:
    bodies = [ask(picture(seed % 4), f"Question {seed}: what is it?", max_tokens=16) for seed in range(12)]

    async def together() -> list[httpx.Response]:
        async with server.async_client() as http:
            return list(await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies)))

    texts = [response.json()["choices"][0]["message"] for response in asyncio.run(together())]
    with server.client() as http:
        assert texts == [http.post(CHAT, json=body).json()["choices"][0]["message"] for body in bodies]


LONG = {"max_tokens": 1500, "ignore_eos": True, "n": 8, "temperature": 1.0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_with_an_error_object(server: LiveServe, stream: bool) -> None:
    with LiveServe(server.process, server.url).client() as http:
        answered = http.post(CHAT, json=ask("Count", deadline_s=0.5, stream=stream, **LONG))
    if answered.headers["content-type"].startswith("application/json"):
        assert answered.status_code == 503
        error = answered.json()["error"]
    else:
        error = test_api_chat.events(answered)[-1]["error"]
    assert error["code"] in ("deadline_exceeded", "deadline_unmeetable")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine_wherever_it_is(server: LiveServe, stream: bool) -> None:
    def sequences() -> float:
        return server.metrics()["vlm_num_sequences_running"]

    wait_for(lambda: sequences() == 0)
    with (
        LiveServe(server.process, server.url).client() as http,
        pytest.raises(httpx.ReadTimeout),
        http.stream(
            "POST", CHAT, json=ask("Count", stream=stream, **LONG), timeout=httpx.Timeout(30, read=0.5)
        ) as answered,
    ):
        started = time.monotonic()
        for _ in answered.iter_bytes():
            if time.monotonic() - started > 0.5:
                raise httpx.ReadTimeout("left")
    wait_for(lambda: sequences() == 0)
    assert server.metrics()["vlm_num_requests_running"] == server.metrics()["vlm_num_requests_waiting"] == 0


def test_a_full_queue_is_429_and_the_rest_is_answered(locked: LiveServe) -> None:
    async def together() -> list[httpx.Response]:
        async with locked.async_client() as http:
            headers = {"authorization": "Bearer key-anna"}
            bodies = (ask(picture(100 + i), "What?", max_tokens=4) for i in range(24))
            return list(await asyncio.gather(*(http.post(CHAT, json=b, headers=headers) for b in bodies)))

    answered = asyncio.run(together())
    assert {response.status_code for response in answered} == {200, 429}
    for response in answered:
        if response.status_code == 429:
            assert response.json()["error"]["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1


def test_callers_share_no_prefix_and_no_name_of_an_image(locked: LiveServe) -> None:
    """Through the queues too: what one key's requests left behind, another's do not find."""
    body = ask(picture(7), "A question with a shared secret in it?", max_tokens=8)
    cached, ids = [], []
    with locked.client() as http:
        for name in (*KEY_NAMES, *KEY_NAMES):
            headers = {"authorization": f"Bearer key-{name}"}
            usage = http.post(CHAT, json=body, headers=headers).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
            upload = http.post("/v1/images", files={"file": picture(7)}, headers=headers)
            ids.append(upload.json()["id"])
    assert cached == [False, False, True, True]
    assert ids[:2] == ids[2:] and len(set(ids)) == 2


def test_a_batch_gives_the_answers_of_its_requests(official: openai.OpenAI, client: httpx.Client) -> None:
    bodies = [
        ask(image_part(picture(seed)), "What?", model="vlm-default", max_tokens=16) for seed in range(4)
    ]
    rows = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})
        for number, body in enumerate(bodies)
    ]
    file = official.files.create(file=("rows.jsonl", "\n".join(rows).encode()), purpose="batch")
    with openai.OpenAI(base_url=official.base_url, api_key="none") as waiting:
        batch = waiting.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: waiting.batches.retrieve(batch.id).status == "completed")
        output = waiting.batches.retrieve(batch.id).output_file_id
        assert output is not None
        lines = [json.loads(line) for line in waiting.files.content(output).text.splitlines()]
    answers = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
    for number, body in enumerate(bodies):
        assert answers[str(number)] == client.post(CHAT, json=body).json()["choices"]


def test_a_topology_says_that_it_is_ready_and_what_it_serves(client: httpx.Client) -> None:
    assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["vlm-default"]


def test_an_autoscaler_finds_the_queues_where_there_are_some(server: LiveServe, client: httpx.Client) -> None:
    assert client.post(CHAT, json=ask(picture(8), "What?", max_tokens=4)).status_code == 200
    found = server.metrics()
    lengths = [name for name in found if name.startswith("vlm_queue_length")]
    assert len(lengths) in (0, 1, 4)  # local; preprocess; preprocess, encode and two replicas'
    for name in lengths:
        assert found[name] == 0 and found[name.replace("length", "oldest_age_seconds")] == 0
    waits = [name for name in found if name.startswith("vlm_queue_wait_milliseconds")]
    assert len(waits) == len(lengths) and all(found[name] >= 0 for name in waits)


def test_a_text_alone_is_answered_and_estimated(client: httpx.Client) -> None:
    answered = client.post(CHAT, json=ask("Hello there", max_tokens=12)).json()
    estimated = client.post("/v1/estimate", json=ask("Hello there")).json()
    assert answered["usage"]["prompt_tokens"] == estimated["prompt_tokens"]
