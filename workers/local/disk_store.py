"""Files by key in a folder that several processes may share, bounded in bytes: a cache that outlives them.

A file is written whole under another name and renamed; it begins with what it is, its key and a digest of
what follows, so that a torn, damaged or foreign one is a miss. The least recently used go first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import struct
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

_MAGIC = b"VLMK\1"
_HEADER = struct.Struct("<5s32s32sQ")  # magic, sha256 of the key, sha256 of the content, its bytes
_TEMPORARY = ".part"
_STALE_S = 3600.0  # age of a temporary file that nobody writes any more
_FULL_PAUSE_S = 60.0  # without writing, after the disk had no room
_LOW_WATER = 0.9  # of the cap, down to which room is made


class DiskStore:
    """Thread-safe. Keys are short texts of letters, digits, dots, dashes and underscores."""

    def __init__(self, folder: Path, cap_bytes: int) -> None:
        """Makes the folder, for its owner alone. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._used = 0
        self._added = 0  # bytes since the folder was looked through
        self.make_room()

    def has(self, key: str) -> bool:
        """Whether there is a file; what is in it shows when it is read."""
        return os.path.exists(self._path(key))

    def get(self, key: str) -> bytes | None:
        """What was put, or None: a file that isn't whole is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        content = _content(data, key)
        if content is None:
            log.warning("a file of the disk cache is damaged or another's: it is removed")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> bool:
        """False where it was not kept: the disk has no room, or the content is larger than the cap."""
        size = _HEADER.size + len(content)
        if size > self._cap_bytes or time.monotonic() < self._paused_until:
            return False
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{_TEMPORARY}")
        header = _HEADER.pack(_MAGIC, _digest(key.encode()), _digest(content), len(content))
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with temporary.open("wb") as file:
                file.write(header)
                file.write(content)
            temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._pause(error)
            return False
        with self._lock:
            self._used += size
            self._added += size
            is_over = self._used > self._cap_bytes or self._added > self._cap_bytes // 8
        if is_over:
            self.make_room()
        return True

    def make_room(self) -> None:
        """Counts what all processes put, and removes the least recently used beyond the cap."""
        found: list[tuple[float, int, str]] = []
        half_written: list[tuple[float, str]] = []
        for folder in _scan(str(self._folder)):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _scan(folder.path):
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(_TEMPORARY):
                        found.append((info.st_mtime, info.st_size, entry.path))
                    else:
                        half_written.append((info.st_mtime, entry.path))
        newest = max((mtime for mtime, _, _ in found), default=0.0)  # on the clock of whoever keeps the files
        for mtime, path in half_written:
            if newest - mtime > _STALE_S:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        used = sum(size for _, size, _ in found)
        if used > self._cap_bytes:
            for _, size, path in sorted(found):
                if used <= self._cap_bytes * _LOW_WATER:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    used -= size
        with self._lock:
            self._used, self._added = used, 0

    @property
    def used_bytes(self) -> int:
        """As of the latest look through the folder, and what was put since."""
        return self._used

    def _pause(self, error: OSError) -> None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if is_full else error.strerror
        log.warning("the disk cache keeps nothing for %d s: %s", _FULL_PAUSE_S, reason)
        self._paused_until = time.monotonic() + _FULL_PAUSE_S

    def _path(self, key: str) -> Path:
        return self._folder / _digest(key.encode()).hex()[:2] / key


def _content(data: bytes, key: str) -> bytes | None:
    if len(data) < _HEADER.size:
        return None
    magic, named, digest, size = _HEADER.unpack_from(data)
    content = data[_HEADER.size :]
    if (magic, named, size) != (_MAGIC, _digest(key.encode()), len(content)) or _digest(content) != digest:
        return None
    return content


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _scan(path: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return list(entries)
    return []
