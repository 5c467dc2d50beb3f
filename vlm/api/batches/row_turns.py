"""Whose row runs next: keys take turns, and within a key its batches do, however long either is."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Line:
    """Those of one key or batch that wait, and what is known of its turns."""

    running: int = 0
    last_turn: int = 0  # when it had one, counted in turns of all

    @property
    def rank(self) -> tuple[int, int]:
        """The owner with the least under way is next; among equals, the one that has waited longest."""
        return self.running, self.last_turn


@dataclass(slots=True)
class _Key(_Line):
    batches: dict[str, _Line] = field(default_factory=dict)


class RowTurns:
    """Bounds the rows under way: those of one key to `per_key`, those of all to `spare` more, so that a key's
    rows never hold every place. One event loop."""

    def __init__(self, per_key: int, spare: int = 0) -> None:
        self._free = per_key + spare
        self._per_key = per_key
        self._keys: dict[str, _Key] = {}
        self._waiting: dict[tuple[str, str], list[asyncio.Future[None]]] = {}
        self._num_turns = 0

    @property
    def running(self) -> Counter[str]:
        """Rows under way, by key."""
        return Counter({name: key.running for name, key in self._keys.items() if key.running})

    @contextlib.asynccontextmanager
    async def turn(self, key: str, batch: str) -> AsyncIterator[None]:
        await self.acquire(key, batch)
        try:
            yield
        finally:
            self.release(key, batch)

    async def acquire(self, key: str, batch: str) -> None:
        """Waits for a turn, which lasts until `release`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keys.setdefault(key, _Key()).batches.setdefault(batch, _Line())
        self._waiting.setdefault((key, batch), []).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(key, batch)
            else:
                self._leave(key, batch, turn)
            raise

    def release(self, key: str, batch: str) -> None:
        self._free += 1
        self._count(key, batch, -1)
        self._forget(key, batch)
        self._grant()

    def _grant(self) -> None:
        while self._free and (found := self._next()):
            turn = next(turn for turn in self._waiting[found] if not turn.cancelled())
            self._leave(*found, turn, forget=False)
            self._free -= 1
            self._num_turns += 1
            self._count(*found, 1)
            turn.set_result(None)

    def _next(self) -> tuple[str, str] | None:
        waiting = [
            (self._keys[key].rank, self._keys[key].batches[batch].rank, key, batch)
            for (key, batch), turns in self._waiting.items()
            # a cancelled one is about to leave
            if self._keys[key].running < self._per_key and not all(turn.cancelled() for turn in turns)
        ]
        return min(waiting)[2:] if waiting else None

    def _count(self, key: str, batch: str, change: int) -> None:
        for line in (self._keys[key], self._keys[key].batches[batch]):
            line.running += change
            if change > 0:
                line.last_turn = self._num_turns

    def _leave(self, key: str, batch: str, turn: asyncio.Future[None], forget: bool = True) -> None:
        turns = self._waiting[key, batch]
        turns.remove(turn)
        if not turns:
            del self._waiting[key, batch]
        if forget:
            self._forget(key, batch)

    def _forget(self, key: str, batch: str) -> None:
        """Nothing is kept of those who neither wait nor run."""
        if (key, batch) in self._waiting or self._keys[key].batches[batch].running:
            return
        del self._keys[key].batches[batch]
        if not self._keys[key].batches:
            del self._keys[key]
