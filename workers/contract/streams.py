"""Event streams by request: fed from an engine's events, read by the handler, gathered into an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from llm.request import Delta, Event, Failed, Finished, FinishReason, Timings, TokenLogprob, Usage
from workers.contract.engine_client import ENGINE_DIED


def is_last(event: Event) -> bool:
    """No event of its request follows."""
    return isinstance(event, Failed) or (isinstance(event, Finished) and event.usage is not None)


@dataclass(slots=True)
class AnswerChoice:
    texts: list[str] = field(default_factory=list)  # in pieces
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "stop"

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All that a request was answered. `choices`: by their number."""

    choices: tuple[AnswerChoice, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class AnswerFailed(Exception):
    """The request ended with `failure` instead of an answer."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def gather(events: AsyncGenerator[Event, None]) -> WholeAnswer:
    """Reads a request's events to the last one. Raises `AnswerFailed`, and what reading them raises."""
    choices: defaultdict[int, AnswerChoice] = defaultdict(AnswerChoice)
    async with contextlib.aclosing(events):
        async for event in events:
            match event:
                case Delta():
                    choices[event.choice].texts.append(event.text)
                    choices[event.choice].logprobs += event.logprobs
                case Finished(usage=usage):
                    choices[event.choice].finish_reason = event.reason
                    if usage is not None:
                        ordered = tuple(choices[index] for index in sorted(choices))
                        return WholeAnswer(ordered, usage, event.timings or Timings())
                case Failed():
                    raise AnswerFailed(event)
    raise AnswerFailed(Failed("", *ENGINE_DIED))


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


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels until it helps: before Python 3.12 `asyncio.wait_for`, which clients use, may swallow it."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)
