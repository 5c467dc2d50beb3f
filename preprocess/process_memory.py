"""Memory of long-lived processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h


def steady_memory(num_heaps: int = 2) -> None:
    """Large buffers go back to the system when they are freed; glibc would keep ever larger heaps of them.

    num_heaps: that threads share; each one reserves 64 MiB of address space (mallopt(3), M_ARENA_MAX).
    Where the C library is another one, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18)
        libc.mallopt(_M_ARENA_MAX, num_heaps)


def keep_what_is_loaded() -> None:
    """Python's collector leaves alone what exists by now: modules and models stay, and a full collection
    would walk them all and hold every request for 50 to 150 ms."""
    gc.collect()
    gc.freeze()
