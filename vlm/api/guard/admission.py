"""Who may start, decided before any work: a request that can't be answered in time is refused at once.

Goodput, not throughput: the time until an answer is estimated from the rate at which requests have been
completing, counted over busy time only, so that a quiet hour doesn't look like a slow engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llm.request import Priority
from vlm.config import MEBIBYTE, ServeConfig
from vlm.requests.errors import ApiError

_MIN_COMPLETIONS = 8  # below that a rate is a guess
_WINDOW = 64  # completions that the rate looks back on
_BATCH_SHARE = 0.75  # of waiting requests and decoded bytes; the rest is left to interactive ones


class CompletionRate:
    """Requests per second of busy time, and how many were in flight meanwhile. Forgets a crowd that left
    unanswered: what was measured in its time says nothing of those who come after it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_s = 0.0  # completed busy time
        self._area = 0.0  # in-flight requests, integrated over busy time
        self._in_flight = 0
        self._at = clock()
        self._marks: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # (busy_s, area) as served ones left

    def _advance(self) -> None:
        now = self._clock()
        if self._in_flight:
            self._busy_s += now - self._at
            self._area += (now - self._at) * self._in_flight
        self._at = now

    def started(self) -> None:
        self._advance()
        self._in_flight += 1

    def ended(self, served: bool) -> None:
        """`served`: its answer had begun, or has even ended."""
        self._advance()
        self._in_flight -= 1
        if served:
            self._marks.append((self._busy_s, self._area))
        elif (measured := self._since_first_mark()) and measured[1] > 2 * (self._in_flight + 1):
            self._marks.clear()

    def measured(self) -> tuple[float, float] | None:
        """(completions per second, mean requests in flight), or None before enough was seen."""
        if len(self._marks) < _MIN_COMPLETIONS:
            return None
        return self._between(self._marks[0], self._marks[-1])

    def _since_first_mark(self) -> tuple[float, float] | None:
        """As `measured`, up to now."""
        return self._between(self._marks[0], (self._busy_s, self._area)) if self._marks else None

    def _between(self, first: tuple[float, float], last: tuple[float, float]) -> tuple[float, float] | None:
        busy_s = last[0] - first[0]
        return None if busy_s <= 0 else ((len(self._marks) - 1) / busy_s, (last[1] - first[1]) / busy_s)

    def expected_s(self, ahead: int) -> float | None:
        """Seconds until a request that finds `ahead` others in flight has its answer."""
        measured = self.measured()
        if measured is None:
            return None
        rate, in_flight = measured
        # Little: a request among `in_flight` others takes in_flight / rate; each one beyond waits 1 / rate.
        return max(float(ahead + 1), in_flight) / rate


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the service. `begun` once its answer begins, `close` in every case."""

    admission: Admission
    priority: Priority
    decoded_bytes: int
    waiting: bool = True
    open: bool = True

    def begun(self) -> None:
        """Its images are decoded and encoded by now."""
        if self.waiting:
            self.waiting = False
            self.admission.release_bytes(self)

    def close(self, *, completed: bool) -> None:
        if self.open:
            self.open = False
            was_served = completed or not self.waiting
            self.begun()
            self.admission.leave(self, was_served)


class Admission:
    """Bounds requests that wait and bytes of decoded images, and refuses what can't be answered in time.

    Batch tiers get `_BATCH_SHARE` of both bounds, counted over all that wait, so that they leave places.
    """

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._rates: dict[Priority, CompletionRate] = {
            "interactive": CompletionRate(clock),
            "batch": CompletionRate(clock),
        }
        self._tickets: set[Ticket] = set()
        self._decoded_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_active(self) -> int:
        return len(self._tickets)

    def num_waiting(self, priority: Priority | None = None) -> int:
        return sum(t.waiting and priority in (None, t.priority) for t in self._tickets)

    @property
    def decoded_bytes(self) -> int:
        return self._decoded_bytes

    def check_open(self, ready: bool) -> None:
        """The cheap half, before an image is looked at. Raises ApiError 503 or 429."""
        if self.draining:
            raise ApiError(
                503, "shutting_down", "The server is shutting down.", retry_after_s=self._config.drain_s
            )
        if not ready:
            raise ApiError(503, "engine_unavailable", "The engine is not ready.", retry_after_s=2)
        self._check_queue(self._config.max_queued)

    def _check_queue(self, places: int) -> None:
        if self.num_waiting() >= places:
            raise ApiError(
                429,
                "queue_full",
                f"{places} requests are waiting already.",
                retry_after_s=self._until_room(),
            )

    def admit(self, decoded_bytes: int, priority: Priority, deadline_s: float, ready: bool = True) -> Ticket:
        """Raises ApiError 429 or 503 with the time after which another try makes sense."""
        self.check_open(ready)
        share = _BATCH_SHARE if priority == "batch" else 1.0
        self._check_queue(max(1, int(share * self._config.max_queued)))
        room = share * self._config.max_decoded_mb * MEBIBYTE - self._decoded_bytes
        if self._decoded_bytes and decoded_bytes > room:
            raise ApiError(
                503,
                "images_in_flight",
                "Too many image bytes are being processed.",
                retry_after_s=self._until_room(),
            )
        ahead = sum(t.priority == "interactive" or t.priority == priority for t in self._tickets)
        expected_s = self._rates[priority].expected_s(ahead)
        if expected_s is not None and expected_s > deadline_s and self._tickets:
            raise ApiError(
                503,
                "deadline_unmeetable",
                "This request would not be answered before its deadline.",
                retry_after_s=expected_s - deadline_s,
            )
        ticket = Ticket(self, priority, decoded_bytes)
        self._tickets.add(ticket)
        self._decoded_bytes += decoded_bytes
        self._rates[priority].started()
        self._idle.clear()
        return ticket

    def release_bytes(self, ticket: Ticket) -> None:
        self._decoded_bytes -= ticket.decoded_bytes
        ticket.decoded_bytes = 0

    def leave(self, ticket: Ticket, was_served: bool) -> None:
        self._tickets.discard(ticket)
        self._rates[ticket.priority].ended(was_served)
        if not self._tickets:
            self._idle.set()

    def _until_room(self) -> float:
        """Until about one request in eight has left, by the measured rate."""
        measured = self._rates["interactive"].measured() or self._rates["batch"].measured()
        return max(1.0, len(self._tickets) / 8 / measured[0]) if measured else 2.0

    async def drained(self, timeout_s: float) -> bool:
        """Waits for the running requests; False when some still run after `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
