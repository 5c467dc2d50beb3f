"""A file as if it were in memory, read as far as somebody looks at it."""

from __future__ import annotations

import errno
import os

CHANGED = "it changed while it was read"


class FileBytes:
    """Parts of a file by its descriptor. Not mapped: where a mapped file shrinks or its disk fails, the
    system ends the whole process.

    `fault` is the first OSError that reading raised, for those that would take it for damage of the content.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._num_bytes = os.fstat(descriptor).st_size
        self.fault: OSError | None = None

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> bytes:
        """Raises OSError, also where the file has become shorter."""
        start, stop, _ = part.indices(self._num_bytes)
        pieces: list[bytes] = []
        try:
            while start < stop:
                piece = os.pread(self._descriptor, stop - start, start)
                if not piece:
                    raise OSError(errno.EIO, CHANGED)
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            self.fault = self.fault or error
            raise
        return b"".join(pieces)
