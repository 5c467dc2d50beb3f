"""An engine that is another server: llama-server, SGLang, vLLM, Ollama, a hosted API, or this project's own.

Events are made of its server-sent events. It is looked at from time to time, so that a server that loads or
is away shows as an engine that isn't ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from llm.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestError,
    Timings,
    Usage,
    VisualKey,
)
from vlm.pipeline import Chat
from vlm.upstream.chat_request import chat_body
from workers.contract.engine_client import ENGINE_DIED, EngineRefused, EngineUnavailable
from workers.contract.loops import keep_going
from workers.contract.streams import end_tasks
from workers.contract.tiles_handle import TilesHandle

log = logging.getLogger(__name__)

LOOK_S = 2.0  # from one look at the server to the next
CONNECT_S = 10.0
_LOOK_TIMEOUT_S = 10.0
_MAX_LINE_CHARS = 1 << 22  # of one server-sent event
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_REASONS: dict[str, FinishReason] = {"length": "length"}  # everything else ends an answer like a stop


class _NoStream(Exception):
    """The server's answer is no stream. status: HTTP's. code: the server's own word, if it has one."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status = status


@dataclass(slots=True)
class _AnswerUnderWay:
    """What is known of an answer under way."""

    request: Request
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    latest: float = 0.0
    num_deltas: int = 0
    ended: dict[int, FinishReason] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def events(self, chunk: dict[str, Any]) -> list[Event]:
        """Raises ValueError, TypeError, KeyError and AttributeError for what is no chunk."""
        if chunk.get("usage"):
            self.usage = dict(chunk["usage"])
        events: list[Event] = []
        for choice in chunk.get("choices") or ():
            index, text = int(choice.get("index", 0)), (choice.get("delta") or {}).get("content")
            if text:
                self.latest = time.monotonic()
                self.first = self.first or self.latest
                self.num_deltas += 1
                events.append(Delta(self.request.id, index, (), str(text)))
            if reason := choice.get("finish_reason"):
                self.ended[index] = _REASONS.get(str(reason), "stop")
        return events

    def last_events(self) -> list[Event]:
        """The choices' ends, the request's numbers with the last of them."""
        now, planned = time.monotonic(), self.request.prompt
        first = self.first or now
        details = self.usage.get("prompt_tokens_details") or {}
        usage = Usage(
            int(self.usage.get("prompt_tokens", planned.num_tokens)),
            planned.num_image_tokens,
            int(details.get("cached_tokens") or 0),
            int(self.usage.get("completion_tokens", self.num_deltas)),
        )
        gaps = max(usage.completion_tokens // max(1, len(self.ended)) - 1, 1)
        timings = Timings(
            prefill_ms=(first - self.started) * 1e3,
            ttft_ms=(first - self.started) * 1e3,
            tpot_ms=max(self.latest - first, 0.0) / gaps * 1e3,
            total_ms=(now - self.started) * 1e3,
        )
        *others, (index, reason) = sorted(self.ended.items())
        events: list[Event] = [Finished(self.request.id, other, why) for other, why in others]
        return [*events, Finished(self.request.id, index, reason, usage, timings)]


class OpenAIEngine:
    """`EngineClient` over `POST {url}/chat/completions`."""

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        """url: with or without `/v1`. model: its name there; empty: the first that the server lists."""
        url = url.rstrip("/")
        self._url = url if url.endswith("/v1") else f"{url}/v1"
        self._model = model
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # an answer may take as long as its request's own deadline allows
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        is_here = httpx.URL(self._url).host in ("127.0.0.1", "::1", "localhost")
        # as many connections as admission lets through; a proxy has no way to this machine
        self._client = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=httpx.Limits(), trust_env=not is_here
        )
        self._looking: asyncio.Task[None] | None = None
        self._ready = False
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0}
        self._running = 0
        self.info: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        return self._ready

    async def start(self) -> None:
        """Returns after a first look, whether the server is up or not. Raises EngineRefused where it takes no
        key like ours, or has no such model."""
        with contextlib.suppress(httpx.HTTPError, EngineUnavailable):
            await self._look()
        self._looking = asyncio.create_task(
            keep_going("the look at the other server", self._look_later, (httpx.HTTPError, EngineUnavailable))
        )

    async def close(self) -> None:
        if self._looking is not None:
            await end_tasks(self._looking)
        self._ready = False
        await self._client.aclose()

    async def _look_later(self) -> None:
        await asyncio.sleep(LOOK_S)
        await self._look()

    async def _look(self) -> None:
        """Raises httpx.HTTPError and EngineUnavailable while the server is away, EngineRefused for good."""
        was_ready, self._ready = self._ready, False
        answer = await self._client.get(f"{self._url}/models", timeout=_LOOK_TIMEOUT_S)
        if answer.status_code in (401, 403):
            raise EngineRefused(
                f"{self._url} refuses the key (HTTP {answer.status_code}): set engine_key_file, or the "
                "variable VLM_ENGINE_KEY"
            )
        if answer.status_code != 200:
            raise EngineUnavailable(f"{self._url} answers with HTTP {answer.status_code}")
        listed = _names(answer)
        if self._model and listed and self._model not in listed:
            raise EngineRefused(f"{self._url} has no model {self._model}; it has {', '.join(listed[:20])}")
        if not self._model and not listed:
            raise EngineRefused(f"{self._url} lists no model; name one with engine_model")
        self.info = {"model": self._model or listed[0], "backend": "openai", "url": self._url}
        self._ready = True
        if not was_ready:
            log.info("%s is ready", self._url)

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        if not self._ready:
            raise EngineUnavailable("the server that runs the model is not ready")
        if not isinstance(request.chat, Chat):
            raise RequestError(
                "unsupported_parameter", "A plain prompt is not available: another server runs this model."
            )
        body = chat_body(self.info["model"], request.chat, request.params, request.namespace)
        stream = _AnswerUnderWay(request)
        self._running += 1
        is_over = False
        try:
            async for event in self._events(body, stream):
                is_over = isinstance(event, Failed | Finished)
                if isinstance(event, Failed):
                    self._counts["failed"] += 1
                yield event
        finally:
            self._running -= 1
            if not is_over:
                self._counts["cancelled"] += 1

    async def _events(self, body: dict[str, Any], stream: _AnswerUnderWay) -> AsyncGenerator[Event, None]:
        """Raises EngineUnavailable where nothing has been said yet; later an end is a `Failed`."""
        has_begun = False
        try:
            async with contextlib.aclosing(self._chunks(body)) as chunks:
                async for chunk in chunks:
                    for event in stream.events(chunk):
                        has_begun = True
                        yield event
            if not stream.ended:
                raise EOFError
            for event in stream.last_events():
                yield event
            self._counts["finished"] += 1
        except _NoStream as refused:
            yield self._blamed(refused, stream.request)
        except (httpx.HTTPError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the other server's answer ended: %s", error or type(error).__name__)
            if isinstance(error, httpx.TransportError) and not has_begun:
                self._ready = False
                raise EngineUnavailable("the server that runs the model does not answer") from None
            yield Failed(stream.request.id, *ENGINE_DIED)

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Leaving it closes the connection, which is how such servers are told to stop."""
        async with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise await _refusal(answer)
            async with contextlib.aclosing(_events_of(answer)) as events:
                async for data in events:
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise EOFError(f"an error in its stream: {_code(chunk['error'])}")
                    yield chunk

    def _blamed(self, refused: _NoStream, request: Request) -> Failed:
        """Raises EngineUnavailable for what may pass."""
        log.warning("the other server refused a request: %s", refused)
        if refused.status in (429, 502, 503, 504):
            raise EngineUnavailable(f"the server that runs the model is busy or away: HTTP {refused}")
        if refused.status in (401, 403) or refused.status >= 500:
            return Failed(request.id, *ENGINE_DIED)
        return Failed(
            request.id,
            "upstream_refused",
            f"The server that runs this model refused the request: HTTP {refused}.",
        )

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        """Never asked for."""

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        """Never asked for."""

    async def stats(self) -> dict[str, Any]:
        return {"engine": {"running": self._running, "waiting": 0, **self._counts}}

    async def clear_cache(self) -> None:
        """Its caches are its own."""


def _names(answer: httpx.Response) -> list[str]:
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        return [str(model["id"])[:200] for model in answer.json()["data"]]
    return []


async def _refusal(answer: httpx.Response) -> _NoStream:
    """The server's text is not repeated: it may say what is nobody's business."""
    code = ""
    with contextlib.suppress(ValueError, AttributeError, httpx.HTTPError):
        code = _code(json.loads(await answer.aread()).get("error"))
    return _NoStream(answer.status_code, code)


def _code(error: object) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""


async def _events_of(answer: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of each server-sent event. Raises ValueError for one that has no end."""
    async with contextlib.aclosing(_lines(answer)) as lines:
        async for line in lines:
            if line.startswith("data:"):
                yield line[5:].strip()


async def _lines(answer: httpx.Response) -> AsyncGenerator[str, None]:
    pending = ""
    texts: AsyncIterator[str] = answer.aiter_text()
    async for text in texts:
        *whole, pending = (pending + text).split("\n")
        for line in whole:
            yield line
        if len(pending) > _MAX_LINE_CHARS:
            raise ValueError("a server-sent event without an end")
    if pending:
        yield pending
