"""Background loops: none ends in silence.

A loop is a turn that is taken again and again. A turn that raises is logged and taken again after a
pause that grows with every failure in a row.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

log = logging.getLogger(__name__)

PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
SETTLED_S = 10.0  # of one turn, for the failures before it to be forgotten

Errors = tuple[type[Exception], ...]


class _Setbacks:
    """Failures in a row of one loop."""

    def __init__(self, name: str, expected: Errors, max_pause_s: float) -> None:
        self._name = name
        self._expected = expected
        self._max_pause_s = max_pause_s
        self._count = 0
        self._latest: type[BaseException] | None = None

    def note(self, error: BaseException, lasted_s: float) -> float:
        """Seconds until the next turn. An expected error is one line, and no other while it lasts."""
        if lasted_s > SETTLED_S:
            self.clear()
        max_pause_s = MAX_PAUSE_S
        if isinstance(error, self._expected):
            max_pause_s = self._max_pause_s
            if self._latest is not type(error):
                log.warning("%s failed and goes on: %s", self._name, error)
        else:
            log.error("%s failed and goes on", self._name, exc_info=error)
        self._latest = type(error)
        self._count += 1
        return float(min(max_pause_s, PAUSE_S * 2 ** min(self._count - 1, 10)))

    def clear(self) -> None:
        self._count, self._latest = 0, None


async def keep_going(
    name: str,
    turn: Callable[[], Awaitable[bool | None]],
    expected: Errors = (),
    max_pause_s: float = MAX_PAUSE_S,
) -> None:
    """Takes turns until one returns True, or until it is cancelled.

    expected: errors that are expected; after these it pauses for `max_pause_s` at most.
    """
    setbacks = _Setbacks(name, expected, max_pause_s)
    while True:
        started, pause_s = time.monotonic(), 0.0
        try:
            if await turn():
                return
            setbacks.clear()
        except Exception as error:
            pause_s = setbacks.note(error, time.monotonic() - started)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            pause_s = setbacks.note(error, time.monotonic() - started)  # something that it waited for
        await asyncio.sleep(pause_s)


def log_failure(done: Future[Any]) -> None:
    """For `add_done_callback`, where no caller asks how it ended."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("work in the background failed", exc_info=error)


class LoopThread:
    """`keep_going` on a thread of its own."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], bool | None],
        expected: Errors = (),
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._turn = turn
        self._setbacks = _Setbacks(name, expected, max_pause_s)
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def pause(self, seconds: float) -> None:
        """For a turn: until `wake`, `close` or so long."""
        self._woken.wait(seconds)
        if not self.is_closing:
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Returns after the turn under way."""
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self.is_closing and not self._take_turn():
                pass
        finally:
            del self._turn  # of whoever owns this thread: no cycle keeps its connections open

    def _take_turn(self) -> bool | None:
        started = time.monotonic()
        try:
            is_last = self._turn()
            self._setbacks.clear()
        except Exception as error:
            self.pause(self._setbacks.note(error, time.monotonic() - started))
            return False
        return is_last
