"""Batch work's share of a decode process: interactive work, in whatever process, has the processor first."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from preprocess.process_memory import steady_memory

BATCH_NICENESS = 10  # above the process's own: about a tenth of the processor beside it

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """A thread of lower priority beside the caller's; one of the two works at a time.

    A thread, as its priority can't be raised again, and as a process more would be memory more.
    """

    def __init__(self) -> None:
        """Starts the thread, so that its stack is none of what an image needs later."""
        steady_memory(num_heaps=1)
        self._thread = ThreadPoolExecutor(1, initializer=_lower_priority)
        self._thread.submit(int).result()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returns or raises there."""
        return self._thread.submit(function, *args, **kwargs).result()


def _lower_priority() -> None:
    """Linux has a niceness per thread (sched(7)); elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + BATCH_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
