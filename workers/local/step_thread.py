"""Something that is stepped by one thread and fed from many."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from workers.local.progress import LOOK_S, STALL_S, Progress, StallWatch

log = logging.getLogger(__name__)

Out = TypeVar("Out", covariant=True)
Result = TypeVar("Result")


class Stepped(Protocol[Out]):
    """Not thread-safe; `step` does a bounded piece of work."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> Out: ...


S = TypeVar("S", bound="Stepped")


class StepThread(Generic[S, Out]):
    """Builds a `Stepped` on a thread of its own, and runs there what others ask between two steps.

    An exception out of `step` or `after_step` ends the thread and is passed to `on_crash`. So is a hang: work
    without any progress for `stall_s`, inside a step too, where what was built adds to the `Progress` that
    `make` is given.
    """

    def __init__(
        self,
        make: Callable[[Progress], S],
        after_step: Callable[[S, Out], None],
        on_crash: Callable[[], None],
        *,
        stall_s: float = STALL_S,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_crash` is called at most once, on a thread of this object's."""
        self._make = make
        self._after_step = after_step
        self._on_crash = on_crash
        self._progress = Progress()
        self._stall = StallWatch(stall_s, clock)
        self._look_s = look_s
        self._inbox: queue.SimpleQueue[Callable[[S], None] | None] = queue.SimpleQueue()
        self._built: Future[S] = Future()
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._busy = False

    def start(self) -> S:
        """Returns what was built, to read what never changes. Raises what building it raised."""
        self._thread.start()
        stepped = self._built.result()
        self._watcher.start()
        return stepped

    def close(self) -> None:
        """Stops after the step under way, at once if that hangs."""
        self._inbox.put(None)
        self._ended.wait()

    def tell(self, function: Callable[[S], object]) -> None:
        self._inbox.put(lambda stepped: _ignore(function(stepped)))

    def ask(self, function: Callable[[S], Result], timeout_s: float | None = None) -> Result:
        """What `function` returns or raises. Raises TimeoutError."""
        future: Future[Result] = Future()

        def answer(stepped: S) -> None:
            try:
                future.set_result(function(stepped))
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(answer)
        return future.result(timeout_s)

    def _run(self) -> None:
        try:
            stepped = self._make(self._progress)
        except BaseException as error:
            self._built.set_exception(error)
            self._end(crashed=False)
            return
        self._built.set_result(stepped)
        try:
            self._loop(stepped)
        except Exception:
            log.exception("the stepping thread failed")
            self._end(crashed=True)
        else:
            self._end(crashed=False)

    def _loop(self, stepped: S) -> None:
        while True:
            messages = self._waiting(block=not stepped.has_work)
            self._busy = True
            for message in messages:
                self._progress.tick()
                if message is None:
                    return
                message(stepped)
            if stepped.has_work:
                self._progress.tick()
                self._after_step(stepped, stepped.step())
            self._busy = False

    def _watch(self) -> None:
        while not self._ended.wait(self._look_s):
            if self._stall.look(self._progress.count if self._busy else None):
                log.error("a step makes no progress")
                self._end(crashed=True)

    def _end(self, crashed: bool) -> None:
        with self._ending:
            is_first = not self._ended.is_set()
            self._ended.set()
        if crashed and is_first:
            self._on_crash()

    def _waiting(self, block: bool) -> list[Callable[[S], None] | None]:
        messages = [self._inbox.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages


def _ignore(_: object) -> None:
    return None
