"""The output file as a journal: rows are appended, synced, and only then counted as done.

Lines are never rewritten while a run appends. A row that replaces an older one (changed input, another
model, an error tried again) is appended like any other and the later line of a slot holds; when a run ends
with replaced lines in the file, `compact` writes the live ones to a new file and renames it over the old one.
The lock lies on the file itself and moves to the new file before the rename, so at no moment can two
processes write, and a reader sees the whole old file or the whole new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from vlm.caption.index import JournalIndex
from vlm.caption.rows import Row, decode, encode
from vlm.requests.durable import DurableLog, sync_folder


class OutputBusy(Exception):
    """Another process writes this output."""


class NotAnOutput(ValueError):
    """The file holds something else; it is left alone."""


class Journal:
    """Rows of one output file. Its index lives in a private temporary database, so memory stays bounded."""

    def __init__(self, path: Path) -> None:
        """Raises `OutputBusy`, `NotAnOutput`, OSError. Repairs a last line that a kill tore."""
        self.path = path
        self.num_loaded = 0
        self.num_damaged = 0  # lines in the middle that are not rows, or hold raw bytes of a name
        self._fd = _open_locked(path)
        self._index = JournalIndex()
        try:
            self._log = DurableLog(self._fd, self._load())
        except BaseException:
            os.close(self._fd)
            raise

    def _load(self) -> int:
        offset = 0
        os.lseek(self._fd, 0, os.SEEK_SET)
        if os.pread(self._fd, 1, 0) not in (b"", b"{", b"\0"):
            raise NotAnOutput(f"{self.path} exists and is not an output of this command")
        with open(self._fd, "rb", closefd=False) as lines:
            for line in lines:
                row = decode(line)
                if row is None and offset == 0 and line.endswith(b"\n"):
                    raise NotAnOutput(f"{self.path} exists and is not an output of this command")
                if not line.endswith(b"\n"):
                    return self._repair_tail(offset, line, row)
                if row is not None:
                    self._index.put(row, offset, len(line))
                    self.num_loaded += 1
                self.num_damaged += row is None or not _is_utf8(line)
                offset += len(line)
        return offset

    def _repair_tail(self, offset: int, line: bytes, row: Row | None) -> int:
        """A line without its end: complete it if only the line feed is missing, else cut it off."""
        torn = line.rstrip(b"\0")  # a crash of the machine may leave zeros
        if row is None and offset == 0 and not torn.startswith(b'{"id":"'[: len(torn)]):
            raise NotAnOutput(f"{self.path} exists and is not an output of this command")
        if row is None:
            os.ftruncate(self._fd, offset)
        else:
            os.pwrite(self._fd, b"\n", offset + len(line))
            self._index.put(row, offset, len(line) + 1)
            self.num_loaded += 1
        os.fsync(self._fd)
        return offset if row is None else offset + len(line) + 1

    def settled(self, slot: str, row_id: str) -> Literal["text", "error"] | None:
        """What this very row holds; None if it is missing or wants another try."""
        found = self._index.row(slot)
        if found is None or found[0] != row_id:
            return None
        return "text" if found[1] == "text" else "error" if found[1] == "error" else None

    def row(self, slot: str) -> Row | None:
        found = self._index.row(slot)
        return self._read(found[2], found[3]) if found else None

    def find_work(self, work: str) -> Row | None:
        """A row whose text answers the same page, question and model."""
        place = self._index.work(work)
        return self._read(*place) if place else None

    def saw_document(self, path: str, question: str, file_sha256: str, position: int) -> None:
        """This is the document's content now: rows that answer this question about another are out of date.

        file_sha256: "" if unknown. position: in this run's inputs, for the order of `rows`.
        """
        self._index.saw_document(path, question, file_sha256, position)

    def _read(self, offset: int, length: int) -> Row | None:
        return decode(os.pread(self._fd, length, offset))

    async def append(self, row: Row) -> None:
        """Returns when the row is on disk. Raises OSError."""
        line = encode(row)
        await self._log.append(line, lambda offset: self._index.put(row, offset, len(line)))

    async def flush(self) -> None:
        """Waits until everything appended so far is on disk or has failed."""
        await self._log.flush()

    def rows(self) -> Iterator[Row]:
        """The final view: the last row of each slot, in the order of this run's inputs."""
        for offset, length in self._index.live_places(in_input_order=True):
            row = self._read(offset, length)
            if row is not None:
                yield row

    def compact(self) -> bool:
        """Drops replaced lines, atomically. Returns whether there were any."""
        if not (self._index.num_stale() or self.num_damaged):
            return False
        fresh_path = self.path.with_name(self.path.name + ".new")
        fresh = os.open(fresh_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fresh, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.ftruncate(fresh, 0)
            with open(fresh, "wb", closefd=False) as out:
                for offset, length in self._index.live_places(in_input_order=False):
                    out.write(_clean(os.pread(self._fd, length, offset)))
            os.fsync(fresh)
            os.rename(fresh_path, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh_path)
            os.close(fresh)
            raise
        sync_folder(self.path.parent)
        os.close(self._fd)
        self._fd, self.num_damaged, self.num_loaded = fresh, 0, 0
        self._index.forget_rows()
        self._log = DurableLog(self._fd, self._load())
        return True

    def close(self) -> None:
        self._index.close()
        os.close(self._fd)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _clean(line: bytes) -> bytes:
    """The row as it is written today."""
    row = None if _is_utf8(line) else decode(line)
    return line if row is None else encode(row)


def _open_locked(path: Path) -> int:
    """Opens or creates, and locks. A rename between the two means that the lock is on a dead file: again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotAnOutput(f"{path} is not a regular file (rows go to stdout with: -o -)")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    sync_folder(path.parent)
                    return fd
        except BlockingIOError:
            os.close(fd)
            raise OutputBusy(f"another run is writing {path}") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
