"""Progress is counted: work that gets on, however slowly, is alive; work that does not for long hangs."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

STALL_S = 60.0
"""The default for a hang: nothing at all has got on for so long, not even a layer inside a step."""
LOOK_S = 1.0  # between two looks at a count


class Progress:
    """A count of finished pieces of work. One thread adds to it, native code included; anyone reads it."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.ticks = np.zeros(1, np.int64) if memory is None else np.frombuffer(memory, np.int64, 1)

    @classmethod
    def of_file(cls, fd: int) -> Progress:
        """Shared with every process that opens `fd`, a file of `open_shared`."""
        return cls(mmap.mmap(fd, np.dtype(np.int64).itemsize))

    def tick(self) -> None:
        self.ticks[0] += 1

    @property
    def count(self) -> int:
        return int(self.ticks[0])


def open_shared() -> int:
    """The descriptor of a file for `Progress.of_file`; the caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("progress")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, np.dtype(np.int64).itemsize)
    return fd


class StallWatch:
    """Tells a hang from slow work, by looking at its count every `LOOK_S` or so.

    A look that comes late counts as `2 * LOOK_S` at most: the watcher stood still too (a machine that was
    suspended, a stopped process group), and what it did not see says nothing.
    """

    def __init__(self, stall_s: float = STALL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._count: int | None = None
        self._looked = 0.0
        self._silent_s = 0.0

    def look(self, count: int | None) -> bool:
        """Whether it hangs. `count` is None while there is nothing to do."""
        now = self._clock()
        if count is None or count != self._count:
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._looked, 2 * LOOK_S)
        self._count, self._looked = count, now
        return self._silent_s >= self._stall_s
