"""One call of a node to the replicas: its attempts, and what of its answer was delivered.

A replica that dies takes its attempt along. The next attempt answers anew, which gives the same tokens, as
every call has a seed; what was delivered is skipped. An answer that goes on differently is an error.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llm.request import Delta, Event, Failed, Finished, PromptLogprobs, Request, VisualKey, WantVisual
from workers.cluster.event_stream import ABANDONED, Refused, Started, StreamEvent
from workers.contract.engine_client import ENGINE_DIED
from workers.contract.streams import is_last
from workers.contract.versions import MESSAGE_VERSION


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica of an attempt is dead, or its batches have a gap."""

    attempt: int


@dataclass(slots=True)
class _RemoteChoice:
    tokens: list[int] = field(default_factory=list)
    num_chars: int = 0
    finished: bool = False


class Delivery:
    """What the caller has of an answer, and where the present attempt is in it."""

    def __init__(self) -> None:
        self._choices: dict[int, _RemoteChoice] = {}
        self._seen_tokens: dict[int, int] = {}  # of the present attempt
        self._seen_chars: dict[int, int] = {}
        self._num_prompt_logprobs = 0
        self._seen_prompt_logprobs = 0

    def restart(self) -> None:
        self._seen_tokens.clear()
        self._seen_chars.clear()
        self._seen_prompt_logprobs = 0

    @property
    def begun(self) -> bool:
        return bool(self._choices)

    def pass_on(self, event: Event) -> Event | None:
        """What of the event is new, if anything. Raises ValueError if the answer now differs."""
        match event:
            case Delta():
                return self._delta(event)
            case Finished():
                choice = self._choices.setdefault(event.choice, _RemoteChoice())
                known, choice.finished = choice.finished, True
                return None if known and event.usage is None else event
            case PromptLogprobs():
                seen = self._seen_prompt_logprobs
                self._seen_prompt_logprobs += len(event.logprobs)
                new = event.logprobs[max(0, self._num_prompt_logprobs - seen) :]
                self._num_prompt_logprobs += len(new)
                return replace(event, logprobs=new) if new else None
        return event

    def _delta(self, event: Delta) -> Delta | None:
        choice = self._choices.setdefault(event.choice, _RemoteChoice())
        seen, seen_chars = self._seen_tokens.get(event.choice, 0), self._seen_chars.get(event.choice, 0)
        self._seen_tokens[event.choice] = seen + len(event.token_ids)
        self._seen_chars[event.choice] = seen_chars + len(event.text)
        old = max(0, len(choice.tokens) - seen)
        if tuple(choice.tokens[seen : seen + len(event.token_ids)]) != event.token_ids[:old]:
            raise ValueError("the answer went on differently")
        text = event.text[max(0, choice.num_chars - seen_chars) :]
        new = event.token_ids[old:]
        choice.tokens.extend(new)
        choice.num_chars += len(text)
        if not new and not text:
            return None
        return replace(event, token_ids=new, text=text, logprobs=event.logprobs[old:])


@dataclass(slots=True)
class RemoteCall:
    """State of one `submit`; touched on the event loop only."""

    request: Request  # with a seed
    routing_key: str
    submitted: float  # time.monotonic()
    deadline: float
    attempt: int = 0
    name: str = ""  # of the present attempt
    replica: str = ""
    boot: str = ""
    reader_version: int = MESSAGE_VERSION  # of the replica
    state: Literal["sending", "sent", "started", "lost"] = "sending"
    sent: float = 0.0  # time.monotonic() of the last message
    outages: int = 0  # of Redis, when its replica was last told of it
    next_batch: int = 0
    events: asyncio.Queue[Event | Refused | Lost] = field(default_factory=asyncio.Queue)
    delivery: Delivery = field(default_factory=Delivery)
    first_token: float | None = None  # time.monotonic()
    wants: set[VisualKey] = field(default_factory=set)

    def begin_attempt(self) -> None:
        self.attempt += 1
        self.name = f"{uuid.uuid4().hex}.{self.attempt}"
        self.replica = self.boot = ""
        self.state = "sending"
        self.next_batch = 0
        self.delivery.restart()

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def lose(self) -> None:
        """The present attempt will not end by itself."""
        self.state = "lost"
        self.events.put_nowait(Lost(self.attempt))

    def take(self, number: int, events: Sequence[StreamEvent]) -> None:
        """A batch of the present attempt; one that was taken before is ignored."""
        if self.state == "lost":
            return
        if number == ABANDONED or number > self.next_batch:
            self.lose()
            return
        if number < self.next_batch:
            return
        self.next_batch += 1
        for event in events:
            if isinstance(event, Started):
                self.state = "started"
            elif isinstance(event, Refused):
                self.events.put_nowait(event)
            else:
                self._take(replace(event, request_id=self.request.id))

    def _take(self, event: Event) -> None:
        if isinstance(event, Delta) and self.first_token is None:
            self.first_token = time.monotonic()
        if isinstance(event, WantVisual):
            self.wants.add(event.key)
            self.events.put_nowait(event)
            return
        try:
            new = self.delivery.pass_on(event)
        except ValueError:
            self.events.put_nowait(Failed(self.request.id, *ENGINE_DIED))
            return
        if new is not None:
            self.events.put_nowait(self._on_our_clock(new) if is_last(new) else new)

    def _on_our_clock(self, event: Event) -> Event:
        """Timings from the submission here, the queue's part in `queue_ms`."""
        if not isinstance(event, Finished) or event.timings is None:
            return event
        timings = event.timings
        now = time.monotonic()
        ttft_ms = ((self.first_token or now) - self.submitted) * 1e3
        return replace(
            event,
            timings=replace(
                timings,
                queue_ms=timings.queue_ms + max(0.0, ttft_ms - timings.ttft_ms),
                ttft_ms=ttft_ms,
                total_ms=(now - self.submitted) * 1e3,
            ),
        )
