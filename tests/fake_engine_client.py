"""An engine that answers at once, and a live server around it: API tests without weights.

The model's own spec (tokenizer, template, tiling, costs) is real, so prompts and token counts are too.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import io
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from PIL import Image

from llm.request import (
    Delta,
    Event,
    Failed,
    Finished,
    Request,
    Timings,
    TokenLogprob,
    Usage,
    VisualKey,
    WantVisual,
)
from preprocess.limits import ImageLimits
from vlm.api.app import create_app
from vlm.api.guard.auth import KeyRing
from vlm.api.server import CappedH11
from vlm.config import ServeConfig
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.contract.engine_client import EngineUnavailable
from workers.contract.tiles_handle import TilesHandle
from workers.local.preprocess_inline import InlinePreprocess


@dataclass
class FakeEngine:
    """Says how many tiles it saw, word by word. Keeps tiles and prompts as a real engine's caches would."""

    token_delay_s: float = 0.0
    ready: bool = True
    answer: str | None = None
    fail_with: tuple[str, str] | None = None  # (code, message) after the first word
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    tiles: dict[VisualKey, int] = field(default_factory=dict)
    pixels: dict[VisualKey, bytes] = field(default_factory=dict)
    failures: dict[VisualKey, tuple[str, str]] = field(default_factory=dict)
    num_wants: int = 0
    hold: asyncio.Event | None = None  # answers wait for it
    spec: ModelSpec | None = None
    _seen: list[tuple[tuple[int, ...], tuple[Any, ...], str]] = field(default_factory=list)
    _dead: bool = False

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self.die("shutting_down", "The server is shutting down.")

    def die(self, code: str = "engine_died", message: str = "The engine stopped.") -> None:
        self._dead, self._death = True, (code, message)
        self.ready = False

    def _cached_tokens(self, request: Request) -> int:
        prompt = request.prompt
        best = 0
        for token_ids, spans, namespace in self._seen:
            if namespace == request.namespace and spans[: len(prompt.spans)] == prompt.spans[: len(spans)]:
                same = 0
                for ours, theirs in zip(prompt.token_ids, token_ids, strict=False):
                    if ours != theirs:
                        break
                    same += 1
                best = max(best, same)
        self._seen.append((prompt.token_ids, prompt.spans, request.namespace))
        return min(best, prompt.num_tokens - 1)

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        if not self.ready:
            raise EngineUnavailable("down")
        self.submitted.append(request)
        self.running.add(request.id)
        finished = False
        try:
            async for event in self._events(request):
                finished = isinstance(event, Failed) or (
                    isinstance(event, Finished) and event.usage is not None
                )
                yield event
        finally:
            self.running.discard(request.id)
            if not finished:
                self.cancelled.append(request.id)

    async def _pause(self, seconds: float = 0.0) -> Failed | None:
        await asyncio.sleep(seconds)
        while self.hold is not None and not self.hold.is_set() and not self._dead:
            await asyncio.sleep(0.005)
        return Failed("", *self._death) if self._dead else None

    async def _events(self, request: Request) -> AsyncIterator[Event]:
        keys = list(dict.fromkeys(span.key for span in request.prompt.spans))
        wanted, started = self.num_wants, time.monotonic()
        for key in keys:
            if key not in self.tiles and key not in self.failures:
                self.num_wants += 1
                yield WantVisual(request.id, key)
        while any(key not in self.tiles for key in keys):
            failed = next((self.failures[key] for key in keys if key in self.failures), None)
            if failed or self._dead:
                yield Failed(request.id, *(failed or self._death))
                return
            await asyncio.sleep(0.002)
        encode_ms = 0.0 if wanted == self.num_wants else (time.monotonic() - started) * 1e3 + 1.0
        cached = self._cached_tokens(request)
        text = self.answer if self.answer is not None else self._default_answer(keys)
        assert self.spec is not None
        ids = self.spec.tokenizer.encode(text, allow_special=False)
        limit = request.params.max_tokens
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(request.params.n)]
        for position, token_id in enumerate(ids[:limit]):
            died = await self._pause(self.token_delay_s)
            if died or (self.fail_with and position == 1):
                yield replace(died, request_id=request.id) if died else Failed(request.id, *self.fail_with)  # type: ignore[misc]
                return
            logprobs = self._logprobs(request, token_id)
            data = self.spec.tokenizer.token_bytes(token_id)
            for choice, decoder in enumerate(decoders):
                yield Delta(request.id, choice, (token_id,), decoder.decode(data), logprobs)
        if died := await self._pause():
            yield replace(died, request_id=request.id)
            return
        prompt = request.prompt
        used = Usage(
            prompt.num_tokens, prompt.num_image_tokens, cached, min(len(ids), limit) * request.params.n
        )
        reason = "length" if len(ids) > limit else "stop"
        for choice in range(request.params.n):
            last = choice == request.params.n - 1
            timings = Timings(encode_ms=encode_ms, prefill_ms=2.0, ttft_ms=3.0, total_ms=4.0)
            yield Finished(request.id, choice, reason, used if last else None, timings if last else None)  # type: ignore[arg-type]

    def _default_answer(self, keys: list[VisualKey]) -> str:
        return f"I saw {len(keys)} images in {sum(self.tiles[key] for key in keys)} tiles."

    @staticmethod
    def _logprobs(request: Request, token_id: int) -> tuple[TokenLogprob, ...]:
        if request.params.logprobs is None:
            return ()
        top = tuple((token_id + i, -0.1 - i) for i in range(request.params.logprobs))
        return (TokenLogprob(token_id, -0.1, top),)

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        self.tiles[key] = tiles.grid.num_tiles
        self.pixels[key] = bytes(tiles.wire())

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        self.failures[key] = (code, message)

    async def stats(self) -> dict[str, Any]:
        return {"engine": {"kv_blocks": 10, "kv_blocks_held": 1}, "visual_cache": {"queries": 1, "hits": 0}}

    async def clear_cache(self) -> None:
        self.tiles.clear()


_SPECS: list[ModelSpec] = []


def model_spec() -> ModelSpec:
    """The shipped model's, read once for all tests."""
    if not _SPECS:
        _SPECS.append(ModelSpec.load("default"))
    return _SPECS[0]


def make_pipeline(engine: FakeEngine, limits: ImageLimits | None = None, **options: Any) -> Pipeline:
    engine.spec = model_spec()
    stage = options.pop("preprocess", None) or InlinePreprocess()
    return Pipeline(engine.spec, stage, engine, limits, **options)


@dataclass
class LiveServer:
    """uvicorn in a thread, on a free port."""

    app: FastAPI
    engine: FakeEngine
    url: str
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server

    @property
    def service(self) -> Any:
        return self.app.state.service

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, **options)


@contextlib.contextmanager
def live_server(
    engine: FakeEngine | None = None,
    config: ServeConfig | None = None,
    keys: KeyRing | None = None,
    **options: Any,
) -> Iterator[LiveServer]:
    engine = engine or FakeEngine()
    config = config or ServeConfig()
    app = create_app(make_pipeline(engine, **options), config, keys=keys)
    with _running(app) as (url, loop, server):
        yield LiveServer(app, engine, url, loop, server)


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of an app that a server in a thread serves."""
    with _running(app) as (url, _, _):
        yield url


@contextlib.contextmanager
def _running(app: FastAPI) -> Iterator[tuple[str, asyncio.AbstractEventLoop, uvicorn.Server]]:
    settings = uvicorn.Config(
        app, port=0, http=CappedH11, ws="none", access_log=False, log_config=None, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(settings)
    started = threading.Event()
    holder: dict[str, Any] = {}

    async def serve() -> None:
        holder["loop"] = asyncio.get_running_loop()
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        if server.started:
            holder["port"] = server.servers[0].sockets[0].getsockname()[1]
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(30) and "port" in holder, "the server did not start"
    try:
        yield f"http://127.0.0.1:{holder['port']}", holder["loop"], server
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


def png(width: int = 64, height: int = 48, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data), **more}}


def ask(*content: Any, **settings: Any) -> dict[str, Any]:
    """A chat request's body: images are bytes or parts, texts are strings."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else image_part(part)
        if isinstance(part, bytes)
        else part
        for part in content
    ]
    return {"messages": [{"role": "user", "content": parts}], **settings}
