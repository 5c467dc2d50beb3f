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
MOST_WAITING = 64  # events that a slow reader leaves unwritten; then the answer waits for it


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
    """Server-sent events from `chunks`; `close` runs in every case, however far the stream got.

    One task draws the events, another writes what has come: events that come together are one write.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks
        self._close = close
        self._waiting: list[bytes] = []  # drawn, not yet written
        self._news = asyncio.Event()  # something waits, or a task has ended
        self._room = asyncio.Event()
        self._drawing: asyncio.Task[None] | None = None

    async def _draw(self) -> None:
        async for chunk in self._chunks:
            self._waiting.append(chunk)
            self._news.set()
            if len(self._waiting) >= MOST_WAITING:
                self._room.clear()
                await self._room.wait()

    def _watched(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        task.add_done_callback(lambda _: self._news.set())
        return task

    async def _wait(self, seconds: float) -> bool:
        """Whether there was news within so many."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def begin(self, request: Request) -> EventStream:
        """Waits for the first event, within limits, so that a failure before it gets its own status.

        Raises ApiError, and ClientDisconnect.
        """
        drawing = self._drawing = self._watched(asyncio.create_task(self._draw()))
        gone = self._watched(asyncio.create_task(_disconnected(request.receive)))
        try:
            await self._wait(HOLD_S)
            if not self._waiting and drawing.done():
                await drawing
            if gone.done() and not self._waiting and not drawing.done():
                raise ClientDisconnect
        except BaseException:
            await self._finish()
            raise
        finally:
            await end_tasks(gone)
        return self

    async def _finish(self) -> None:
        if self._drawing is not None:
            await end_tasks(self._drawing)
        with contextlib.suppress(Exception):
            await self._chunks.aclose()
        self._close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = self._watched(asyncio.create_task(_disconnected(receive)))
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

        drawing = self._drawing or self._watched(asyncio.create_task(self._draw()))
        self._drawing = drawing
        while not gone.done():
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._room.set()
            if data:
                await write(data)
            elif drawing.done():
                break
            elif not await self._wait(KEEP_ALIVE_S):
                await write(KEEP_ALIVE)
        else:
            return
        try:
            drawing.result()
        except ApiError as error:
            await write(sse_error(error))
        except Exception:
            await write(sse_error(ApiError(500, *INTERNAL)))
            raise
        await write(b"", more=False)
