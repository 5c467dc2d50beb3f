"""Bytes that our processes share without a copy: written once, sealed, handed on by descriptor.

A seal keeps what a reader has mapped as it is, whatever becomes of the process that wrote it: a file that
shrank below its mapping would end the reader (memfd_create(2), "File sealing").
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence


def seal(parts: Sequence[bytes | memoryview]) -> int | None:
    """The descriptor of sealed memory that holds these; the caller closes it. None where the system has no
    such memory: Linux has. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("vlm-tiles", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _seals() -> int:
    return fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """What `seal` made, in any process that was given its descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over. Raises ValueError for anything that is not sealed memory."""
        self._close = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
        except (OSError, AttributeError):
            is_sealed = False
        if not is_sealed:
            self.close()
            raise ValueError("the memory is not sealed")
        self.num_bytes = os.fstat(descriptor).st_size

    def start(self, count: int) -> bytes:
        """The first `count` bytes, or as many as there are."""
        return os.pread(self.descriptor, count, 0)

    def map(self) -> memoryview:
        """All of it, to read; usable after `close`. Raises OSError, and ValueError where it is empty."""
        return memoryview(mmap.mmap(self.descriptor, self.num_bytes, prot=mmap.PROT_READ))

    def close(self) -> None:
        self._close()
