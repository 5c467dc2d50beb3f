"""Lines appended to a file and counted only once they are on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class _Append:
    line: bytes
    then: Callable[[int], None]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Exception) -> None:
        self.done.set_exception(error)
        self.done.exception()  # read, also where the caller has gone


class DurableLog:
    """Appends at `end` of a file, open or opened for each write. Lines that come during a sync share the next
    one. One event loop."""

    def __init__(self, file: int | Path, end: int) -> None:
        self._file = file
        self._end = end
        self._pending: list[_Append] = []
        self._writer: asyncio.Task[None] | None = None

    async def append(self, line: bytes, then: Callable[[int], None] = lambda offset: None) -> None:
        """Returns when the line is on disk and `then` was called with its offset. Raises OSError, and what
        `then` raises.

        A caller that is cancelled meanwhile does not undo it.
        """
        item = _Append(line, then)
        self._pending.append(item)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_pending())
        await asyncio.shield(item.done)

    async def _write_pending(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self._write, b"".join(item.line for item in batch))
            except Exception as error:
                for item in batch:
                    item.fail(error)
                continue
            for item in batch:
                offset, self._end = self._end, self._end + len(item.line)
                try:
                    item.then(offset)
                except Exception as error:
                    item.fail(error)
                else:
                    item.done.set_result(None)

    def _write(self, data: bytes) -> None:
        """All or nothing: what a full disk took of the lines is cut off again."""
        position = self._end
        with self._opened() as fd:
            try:
                while data:
                    written = os.pwrite(fd, data, position)
                    position, data = position + written, data[written:]
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, self._end)
                raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        if isinstance(self._file, int):
            yield self._file
            return
        fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    async def flush(self) -> None:
        """Waits until everything appended so far is on disk or has failed."""
        while self._writer is not None and not self._writer.done():
            await asyncio.shield(self._writer)


def make_folder(folder: Path) -> None:
    """Makes it and its parents, unless they are there, and their names durable."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in made:
        sync_folder(path.parent)


def sync_folder(folder: os.PathLike[str]) -> None:
    """Makes the name of a created or renamed file durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
