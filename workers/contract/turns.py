"""Whose image is decoded next: interactive requests before batch work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from llm.request import Priority
from workers.contract.stages import Urgency

AGEING_S = 5.0


@dataclass(eq=False, slots=True)
class _Entry:
    num_bytes: int
    urgency: Urgency
    since: float
    granted: asyncio.Future[None]
    held_as: Priority | None = None

    @property
    def rank(self) -> float:
        return self.since + (AGEING_S if self.urgency.priority == "batch" else 0.0)


class Turns:
    """Bounds how many work at once, and the bytes that they hold together.

    Batch work lets everything interactive pass that came less than `AGEING_S` after it, and never holds all
    places where there are several: an interactive image finds one free, or held by its own kind. Whoever is
    next and lacks bytes is not passed; one above the whole bound is served alone.
    """

    def __init__(self, places: int, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free_places = places
        self._free_batch_places = max(1, places - 1)
        self._total_bytes = self._free_bytes = total_bytes
        self._clock = clock
        self._queue: list[_Entry] = []

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int, urgency: Urgency) -> AsyncIterator[None]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Entry(min(num_bytes, self._total_bytes), urgency, self._clock(), granted)
        self._queue.append(entry)
        urgency.on_change = self._grant  # a place that batch work must leave free may be free
        self._grant()
        try:
            await granted
            yield
        finally:
            urgency.on_change = None
            if entry.held_as is None:
                self._queue.remove(entry)
            else:
                self._take(entry, entry.held_as, -1)
            self._grant()

    def _grant(self) -> None:
        while (entry := self._next()) is not None:
            self._queue.remove(entry)
            entry.held_as = entry.urgency.priority
            self._take(entry, entry.held_as, 1)
            entry.granted.set_result(None)

    def _next(self) -> _Entry | None:
        if not self._free_places:
            return None
        for entry in sorted(self._queue, key=lambda entry: entry.rank):
            if entry.granted.cancelled() or (
                entry.urgency.priority == "batch" and not self._free_batch_places
            ):
                continue
            return entry if entry.num_bytes <= self._free_bytes else None
        return None

    def _take(self, entry: _Entry, held_as: Priority, count: int) -> None:
        self._free_places -= count
        self._free_batch_places -= count * (held_as == "batch")
        self._free_bytes -= count * entry.num_bytes
