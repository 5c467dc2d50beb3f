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

    An exception out of `step` or `after_step` ends the thread and is told to `on_crash`.
    """

    def __init__(
        self,
        make: Callable[[], S],
        after_step: Callable[[S, Out], None],
        on_crash: Callable[[], None],
    ) -> None:
        self._make = make
        self._after_step = after_step
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Callable[[S], None] | None] = queue.SimpleQueue()
        self._built: Future[S] = Future()
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._busy_since: float | None = None

    def start(self) -> S:
        """Returns what was built, to read what never changes. Raises what building it raised."""
        self._thread.start()
        return self._built.result()

    def close(self) -> None:
        """Stops after the step under way."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def busy_s(self) -> float:
        """How long the step under way has taken; a large value means that it hangs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

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
            stepped = self._make()
        except BaseException as error:
            self._built.set_exception(error)
            return
        self._built.set_result(stepped)
        try:
            self._loop(stepped)
        except Exception:
            log.exception("the stepping thread failed")
            self._on_crash()

    def _loop(self, stepped: S) -> None:
        while True:
            self._busy_since = None
            messages = self._waiting(block=not stepped.has_work)
            self._busy_since = time.monotonic()
            for message in messages:
                if message is None:
                    return
                message(stepped)
            if stepped.has_work:
                self._after_step(stepped, stepped.step())

    def _waiting(self, block: bool) -> list[Callable[[S], None] | None]:
        messages = [self._inbox.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages


def _ignore(_: object) -> None:
    return None
