"""Work that ends when its client goes away, and the response that streams it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm.api.chat.completion import sse_error
from vlm.requests.errors import INTERNAL, ApiError
from workers.contract.streams import end_tasks

T = TypeVar("T")

HOLD_S = 10.0  # a stream's status line waits so long for its first event: errors keep their status
KEEP_ALIVE_S = 15.0
SEND_TIMEOUT_S = 60.0  # for a client that does not read
KEEP_ALIVE = b": keep-alive\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it when the client is gone. Raises ClientDisconnect then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await end_tasks(task, gone)


class EventStream(Response):
    """Server-sent events from `chunks`; `close` runs in every case, however far the stream got."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks
        self._close = close
        self._next: asyncio.Task[bytes] | None = None

    def _start_next(self) -> asyncio.Task[bytes]:
        self._next = asyncio.ensure_future(anext(self._chunks))
        return self._next

    async def begin(self, request: Request) -> EventStream:
        """Waits for the first event, within limits, so that a failure before it gets its own status.

        Raises ApiError, and ClientDisconnect.
        """
        first = self._start_next()
        gone = asyncio.create_task(_disconnected(request.receive))
        try:
            await asyncio.wait({first, gone}, timeout=HOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and first.exception() is not None:
                await first
            if gone.done() and not first.done():
                raise ClientDisconnect
        except BaseException:
            await self._finish()
            raise
        finally:
            await end_tasks(gone)
        return self

    async def _finish(self) -> None:
        if self._next is not None:
            await end_tasks(self._next)
        with contextlib.suppress(Exception):
            await self._chunks.aclose()
        self._close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._pump(gone, send)
        except (ClientDisconnect, TimeoutError, OSError):
            pass  # the reader has left
        finally:
            await end_tasks(gone)
            await self._finish()

    async def _pump(self, gone: asyncio.Task[None], send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        following = self._next or self._start_next()
        while True:
            await asyncio.wait({following, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if not following.done():
                await write(KEEP_ALIVE)
                continue
            try:
                data = following.result()
            except StopAsyncIteration:
                break
            except ApiError as error:
                await write(sse_error(error))
                break
            except Exception:
                await write(sse_error(ApiError(500, *INTERNAL)))
                raise
            await write(data)
            following = self._start_next()
        await write(b"", more=False)
