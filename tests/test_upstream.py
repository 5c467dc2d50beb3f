"""Another server as the engine: its answers are those that clients get, what it can't be asked is refused by
name, and its absence is an engine that isn't ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_engine_client import FakeEngine, live_server, png, serving
from waiting import until

from llm.request import Delta, Event, Failed, Finished, RequestError, SamplingParams
from vlm.config import DEFAULT_MODEL, EngineOptions, SettingsError
from vlm.pipeline import Chat, ChatMessage, ImageInput, Pipeline
from vlm.prompt import PLAIN, Rendering
from vlm.tools.calls import Tool
from vlm.upstream import openai_engine
from vlm.upstream.chat_request import chat_body
from vlm.upstream.compose import read_key, upstream_pipeline
from vlm.upstream.openai_engine import OpenAIEngine
from workers.contract.engine_client import EngineRefused, EngineUnavailable

QUESTION = [ChatMessage("system", ("Be brief.",)), ChatMessage("user", (ImageInput(png()), "What is this?"))]


@contextlib.asynccontextmanager
async def pipeline_over(url: str, **options: Any) -> AsyncIterator[Pipeline]:
    pipeline = upstream_pipeline(EngineOptions(engine="openai", engine_url=url, **options))
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def answer(
    pipeline: Pipeline, params: SamplingParams, chat: list[ChatMessage] = QUESTION
) -> list[Event]:
    return [event async for event in pipeline.run(pipeline.prepare("r", chat, params))]


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


def test_an_answer_is_the_other_servers_with_its_own_numbers() -> None:
    with live_server(FakeEngine(answer="Über alles: ein Bild.")) as running:

        async def main() -> list[Event]:
            async with pipeline_over(running.url) as pipeline:
                return await answer(pipeline, SamplingParams(max_tokens=50, n=2, temperature=0.5))

        events = asyncio.run(main())
    (asked,) = running.engine.submitted
    assert text_of(events, 0) == text_of(events, 1) == "Über alles: ein Bild."
    last = events[-1]
    assert isinstance(last, Finished) and last.usage is not None and last.timings is not None
    assert last.usage.prompt_tokens == asked.prompt.num_tokens
    assert last.usage.image_tokens == asked.prompt.num_image_tokens > 0
    assert sum(isinstance(event, Finished) for event in events) == 2
    assert (asked.params.temperature, asked.params.max_tokens, asked.params.n) == (0.5, 50, 2)
    assert running.engine.num_wants == 1


def test_the_same_image_gives_the_same_answer_as_the_model_itself() -> None:
    """A second `vlm serve` with the real default model, greedily."""
    from vlm.api.app import create_app
    from vlm.build import build_local_pipeline
    from vlm.config import ServeConfig

    params = SamplingParams(max_tokens=24)

    async def direct() -> tuple[list[Event], int]:
        pipeline = build_local_pipeline(EngineOptions(kv_cache_mb=64))
        await pipeline.start()
        try:
            prepared = pipeline.prepare("r", QUESTION, params)
            return [event async for event in pipeline.run(prepared)], prepared.prompt.num_tokens
        finally:
            await pipeline.close()

    async def through(url: str) -> tuple[list[Event], int]:
        async with pipeline_over(url) as pipeline:
            planned = pipeline.prepare("x", QUESTION, params).prompt.num_tokens
            return await answer(pipeline, params), planned

    expected, num_tokens = asyncio.run(direct())
    with serving(create_app(build_local_pipeline(EngineOptions(kv_cache_mb=64)), ServeConfig())) as url:
        found, planned = asyncio.run(through(url))
    assert text_of(found) == text_of(expected) != ""
    last = found[-1]
    assert isinstance(last, Finished) and last.usage is not None
    assert planned == last.usage.prompt_tokens == num_tokens


def test_whoever_leaves_leaves_nothing_running_there() -> None:
    with live_server(FakeEngine(token_delay_s=0.05, answer="word " * 500)) as running:

        async def main() -> None:
            async with pipeline_over(running.url) as pipeline:
                prepared = pipeline.prepare("r", QUESTION, SamplingParams(max_tokens=1000))
                async with contextlib.aclosing(pipeline.run(prepared)) as events:
                    async for event in events:
                        if isinstance(event, Delta) and event.text:
                            break
                await until(lambda: not running.engine.running)
                assert (await pipeline.stats())["engine"]["running"] == 0

        asyncio.run(main())
        assert len(running.engine.cancelled) == 1


def test_a_server_that_dies_in_mid_answer_is_an_engine_that_died() -> None:
    with live_server(FakeEngine(answer="a b c d e f", fail_with=("engine_died", "It stopped."))) as running:

        async def main() -> list[Event]:
            async with pipeline_over(running.url) as pipeline:
                return await answer(pipeline, SamplingParams(max_tokens=50))

        events = asyncio.run(main())
    assert text_of(events) and isinstance(events[-1], Failed) and events[-1].code == "engine_died"


def test_a_server_that_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "LOOK_S", 0.05)
    with Stub() as stub:
        stub.models = (503, {"error": {"message": "Loading model"}})

        async def main() -> None:
            async with pipeline_over(stub.url) as pipeline:
                assert not pipeline.engine.ready
                with pytest.raises(EngineUnavailable):
                    await answer(pipeline, SamplingParams())
                stub.models = (200, MODELS)
                await until(lambda: pipeline.engine.ready)
                assert text_of(await answer(pipeline, SamplingParams())) == "Hi there"
                stub.close()
                await until(lambda: not pipeline.engine.ready)

        asyncio.run(main())


MODELS = {"object": "list", "data": [{"id": "theirs"}, {"id": "other"}]}
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Hi "}}]},
    {"choices": [{"index": 0, "delta": {"content": "there"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 30},
        },
    },
]


class Stub:
    """A server of somebody else's, that notes what it is asked."""

    def __init__(self) -> None:
        self.models: tuple[int, Any] = (200, MODELS)
        self.status, self.error = 200, {}
        self.lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS] + ["data: [DONE]\n\n"]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.keys.append(self.headers.get("authorization"))
                self._send(stub.models[0], json.dumps(stub.models[1]))

            def do_POST(self) -> None:
                stub.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                if stub.status != 200:
                    self._send(stub.status, json.dumps(stub.error))
                else:
                    self._send(200, "".join(stub.lines))

            def _send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


def ask(stub: Stub, params: SamplingParams = SamplingParams(), **options: Any) -> list[Event]:
    async def main() -> list[Event]:
        async with pipeline_over(stub.url, **options) as pipeline:
            return await answer(pipeline, params)

    return asyncio.run(main())


def test_messages_images_and_usage_travel_in_openais_form(stub: Stub) -> None:
    events = ask(stub)
    (body,) = stub.asked
    assert body["model"] == "theirs" and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    image, text = body["messages"][1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is this?"}
    last = events[-1]
    assert isinstance(last, Finished) and last.reason == "length" and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (40, 30, 2)


CHANGED: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": ((3, 1.5),),
    "seed": 11,
    "n": 2,
    "beam_width": 3,
    "stop": ("x",),
    "stop_token_ids": (9,),
    "min_tokens": 3,
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "constraint": ("regex", "[0-9]+"),
    "skip_special_tokens": False,
}
OWN = {"fit_max_tokens", "drop_leading_space"}  # of this server's own doing


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams) if f.name not in OWN])
def test_every_parameter_is_sent_or_refused_by_name(name: str) -> None:
    """A field that is added to the parameters fails here until it has its place."""
    chat = Chat(tuple(QUESTION), PLAIN)
    plain = chat_body("m", chat, SamplingParams(), "")
    try:
        body = chat_body("m", chat, replace(SamplingParams(), **{name: CHANGED[name]}), "")
    except RequestError as error:
        assert error.param in ("logprobs", "prompt_logprobs", "use_beam_search")
    else:
        assert body != plain


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (("json_object", ""), {"response_format": {"type": "json_object"}}),
        (("regex", "[0-9]"), {"structured_outputs": {"regex": "[0-9]"}}),
        (
            ("json_schema", '{"type": "object"}'),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
)
def test_constraints_are_asked_for_as_other_servers_take_them(
    constraint: tuple[str, str], expected: dict[str, Any]
) -> None:
    body = chat_body("m", Chat(tuple(QUESTION), PLAIN), SamplingParams(constraint=constraint), "")
    assert expected.items() <= body.items()


@pytest.mark.parametrize(
    ("rendering", "param"),
    [
        (Rendering(tools=(Tool("look"),)), "tools"),
        (Rendering(continues_last=True), "continue_final_message"),
        (Rendering(begins_answer=False), "add_generation_prompt"),
    ],
)
def test_what_a_rendering_of_ones_own_needs_is_refused(rendering: Rendering, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_body("m", Chat(tuple(QUESTION), rendering), SamplingParams(), "")
    assert caught.value.param == param


def test_a_namespace_travels_as_a_salt_and_template_variables_as_such() -> None:
    chat = Chat(tuple(QUESTION), Rendering(variables={"enable_thinking": False}))
    body = chat_body("m", chat, SamplingParams(), "tenant")
    assert body["cache_salt"] == "tenant" and body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_busy_is_one_to_try_again(stub: Stub, status: int) -> None:
    stub.status = status
    with pytest.raises(EngineUnavailable):
        ask(stub)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            {"error": {"code": "context_length_exceeded", "message": "Secret."}},
            "HTTP 400 context_length_exceeded.",
        ),
        ({"error": {"code": "<b>", "message": "Secret."}}, "HTTP 400."),
        ({"error": "Secret."}, "HTTP 400."),
        ("Secret.", "HTTP 400."),
    ],
)
def test_a_refusal_is_told_without_the_other_servers_words(stub: Stub, error: Any, shown: str) -> None:
    stub.status, stub.error = 400, error
    (failed,) = ask(stub)
    assert isinstance(failed, Failed) and failed.code == "upstream_refused"
    assert failed.message.endswith(shown) and "Secret" not in failed.message


@pytest.mark.parametrize(
    "lines",
    [
        ["data: {\n\n"],
        ["data: 3\n\n"],
        ['data: {"choices": [3]}\n\n'],
        ['data: {"error": {"message": "x"}}\n\n'],
        ['data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'],
        ["data: [DONE]\n\n"],
        [],
    ],
)
def test_an_answer_that_makes_no_sense_or_has_no_end_fails(stub: Stub, lines: list[str]) -> None:
    stub.lines = lines
    last = ask(stub)[-1]
    assert isinstance(last, Failed) and last.code == "engine_died"


def test_the_key_is_sent_and_shown_nowhere(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLM_ENGINE_KEY", "sk-from-variable")
    caplog.set_level("DEBUG")
    ask(stub)
    (tmp_path / "key").write_text("sk-from-file\n")
    ask(stub, engine_key_file=str(tmp_path / "key"))
    assert stub.keys[0] == "Bearer sk-from-variable" and stub.keys[-1] == "Bearer sk-from-file"
    assert "sk-from" not in caplog.text


def test_a_key_file_that_holds_no_key_is_refused_without_its_text(tmp_path: Path) -> None:
    for text in ("", "two keys", "bad\x01key"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(SettingsError, match="one key") as caught:
            read_key(str(tmp_path / "key"))
        assert not text or text not in str(caught.value)
    with pytest.raises(SettingsError, match="engine_key_file"):
        read_key(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stub: setattr(stub, "models", (401, {})), "refuses the key"),
        (lambda stub: setattr(stub, "models", (200, {"data": []})), "lists no model"),
    ],
)
def test_a_server_of_no_use_ends_the_start(stub: Stub, change: Callable[[Stub], None], words: str) -> None:
    change(stub)
    with pytest.raises(EngineRefused, match=words):
        ask(stub)


def test_a_model_that_the_server_has_not_is_named_with_those_that_it_has(stub: Stub) -> None:
    with pytest.raises(EngineRefused, match="no model mine; it has theirs, other"):
        ask(stub, engine_model="mine")
    assert text_of(ask(stub, engine_model="other")) == "Hi there"
    assert stub.asked[-1]["model"] == "other"


def test_an_engine_without_an_address_and_an_address_that_is_none_are_refused() -> None:
    with pytest.raises(SettingsError, match="--engine-url"):
        upstream_pipeline(EngineOptions(engine="openai"))
    for url in ("localhost:8000", "ftp://host", "http://user:pass@host"):
        with pytest.raises(SettingsError, match="engine_url"):
            EngineOptions(engine="openai", engine_url=url)


def test_no_weights_are_read_and_no_torch_is_loaded(tmp_path: Path) -> None:
    import os
    import shutil
    import subprocess
    import sys

    shutil.copytree(DEFAULT_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    code = f"""
import sys
from llm.request import SamplingParams
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput
from vlm.upstream.compose import upstream_pipeline
options = EngineOptions(model={str(tmp_path / "model")!r}, engine="openai", engine_url="http://127.0.0.1:1")
chat = [ChatMessage("user", (ImageInput(sys.stdin.buffer.read()), "Hi"))]
upstream_pipeline(options).prepare("r", chat, SamplingParams())
assert "torch" not in sys.modules
"""
    root = str(Path(__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", code], input=png(), check=True, env={**os.environ, "PYTHONPATH": root}
    )


def test_an_engine_says_where_it_asks_and_takes_an_address_with_or_without_v1(stub: Stub) -> None:
    async def main() -> None:
        for url in (stub.url, f"{stub.url}/", f"{stub.url}/v1", f"{stub.url}/v1/"):
            engine = OpenAIEngine(url)
            await engine.start()
            assert engine.ready and engine.info["url"] == f"{stub.url}/v1"
            await engine.close()

    asyncio.run(main())
