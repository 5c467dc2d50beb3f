"""Event streams by request: fed from an engine's events, read by the request's handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from llm.request import Event, Failed, Finished


def is_last(event: Event) -> bool:
    """No event of its request follows."""
    return isinstance(event, Failed) or (isinstance(event, Finished) and event.usage is not None)


class StreamTable:
    """Queues of the live requests. Used from one event loop only.

    Queues are bounded by what a request may generate, since an engine stops at `max_tokens`.
    """

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, request_id: str) -> None:
        if request_id in self._queues:
            raise ValueError("request id is already in use")
        self._queues[request_id] = asyncio.Queue()

    def feed(self, events: list[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def fail_all(self, code: str, message: str) -> None:
        for request_id, queue in self._queues.items():
            queue.put_nowait(Failed(request_id, code, message))

    def discard(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    async def read(self, request_id: str, cancel: Callable[[str], None]) -> AsyncGenerator[Event, None]:
        """Yields until the last event; leaving earlier calls `cancel`."""
        queue = self._queues[request_id]
        finished = False
        try:
            while not finished:
                event = await queue.get()
                finished = is_last(event)
                yield event
        finally:
            self.discard(request_id)
            if not finished:
                cancel(request_id)


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancels until it helps: before Python 3.12 `asyncio.wait_for`, which clients use, may swallow it."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)
