"""Files on disk: uploaded by clients, or written by batches.

One folder for each namespace, two files for each file: its bytes, and what is known of it, which is renamed
into place last, so that a crash leaves no half file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from vlm.requests.durable import make_folder, sync_folder
from vlm.requests.errors import ApiError, invalid
from vlm.requests.media import FILE_ID

PURPOSES = ("batch", "batch_output", "vision", "user_data")
LIFETIMES_S = (3600, 30 * 86_400)  # shortest and longest of `expires_after`, as at OpenAI
_LEFT_S = 3600.0  # after its last change, a half file counts as abandoned
_NOT_FOUND = ("file_not_found", "File not found.")


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    bytes: int
    created_at: int  # Unix time
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"


def default_data_dir() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "vlm"


class FileStore:
    """Blocking; call it from a thread. Raises ApiError 404 for what isn't there or is someone else's."""

    def __init__(
        self, root: Path, *, max_file_bytes: int, max_total_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root / "files"
        self._max_file_bytes = max_file_bytes
        self._max_total_bytes = max_total_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._coming_bytes = 0  # of files that are being copied

    def _folder(self, namespace: str) -> Path:
        return self._root / hashlib.sha256(namespace.encode()).hexdigest()[:32]

    def _meta(self, namespace: str, file_id: str) -> Path:
        if not FILE_ID.fullmatch(file_id):
            raise ApiError(404, *_NOT_FOUND)
        return self._folder(namespace) / f"{file_id}.json"

    def path(self, namespace: str, file_id: str) -> Path:
        """Where a file's bytes lie."""
        self.get(namespace, file_id)
        return self._meta(namespace, file_id).with_suffix(".bin")

    def locate(self, namespace: str, file_id: str) -> tuple[Path, os.stat_result]:
        """Where a file's bytes lie, and what the system knows of them."""
        path = self.path(namespace, file_id)
        try:
            return path, path.stat()
        except FileNotFoundError:
            raise ApiError(404, *_NOT_FOUND) from None

    def sweep(self) -> None:
        """Removes what has expired, and what a crash left half done. Younger pieces may be another process's
        work."""
        for meta in self._root.glob("*/file-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, ApiError):
                self._read(meta)
        for path in self._root.glob("*/file-*"):
            if path.suffix == ".json" or (path.suffix == ".bin" and path.with_suffix(".json").exists()):
                continue
            with contextlib.suppress(OSError):
                if self._clock() - path.stat().st_ctime > _LEFT_S:
                    path.unlink()

    def total_bytes(self) -> int:
        total = 0
        for path in self._root.glob("*/*.bin"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                total += path.stat().st_size
        return total

    @contextlib.contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        """Files that come at once share what is left. Raises ApiError 413."""
        if num_bytes > self._max_file_bytes:
            raise ApiError(
                413, "file_too_large", f"A file may have at most {self._max_file_bytes} bytes.", "file"
            )
        with self._lock:
            if self.total_bytes() + self._coming_bytes + num_bytes > self._max_total_bytes:
                self.sweep()
            if self.total_bytes() + self._coming_bytes + num_bytes > self._max_total_bytes:
                raise ApiError(413, "file_store_full", "The file store is full.", "file")
            self._coming_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._coming_bytes -= num_bytes

    def add(
        self,
        namespace: str,
        filename: str,
        purpose: str,
        source: BinaryIO,
        lifetime_s: int | None = None,
    ) -> StoredFile:
        """Copies `source`, which can be sought in. Raises ApiError 413 for a file or a sum of files above its
        cap."""
        folder = self._folder(namespace)
        make_folder(folder)
        file_id = f"file-{uuid.uuid4().hex}"
        target = folder / f"{file_id}.bin"
        partial = target.with_suffix(".part")
        num_bytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        try:
            with self._room(num_bytes):
                with partial.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
                return self._publish(namespace, file_id, filename, purpose, partial, lifetime_s)
        finally:
            partial.unlink(missing_ok=True)

    def adopt(self, namespace: str, filename: str, purpose: str, path: Path) -> StoredFile:
        """Takes over a finished file, such as a batch's output, by moving it here."""
        folder = self._folder(namespace)
        make_folder(folder)
        file_id = f"file-{uuid.uuid4().hex}"
        partial = folder / f"{file_id}.part"
        shutil.move(path, partial)
        return self._publish(namespace, file_id, filename, purpose, partial)

    def _publish(
        self,
        namespace: str,
        file_id: str,
        filename: str,
        purpose: str,
        partial: Path,
        lifetime_s: int | None = None,
    ) -> StoredFile:
        meta = self._meta(namespace, file_id)
        now = int(self._clock())
        expires_at = None if lifetime_s is None else now + lifetime_s
        stored = StoredFile(file_id, partial.stat().st_size, now, filename, purpose, expires_at)
        partial.rename(meta.with_suffix(".bin"))
        written = meta.with_suffix(".meta")
        with written.open("w") as out:
            json.dump(asdict(stored), out)
            out.flush()
            os.fsync(out.fileno())
        written.rename(meta)
        sync_folder(meta.parent)
        return stored

    def get(self, namespace: str, file_id: str) -> StoredFile:
        return self._read(self._meta(namespace, file_id))

    def _read(self, meta: Path) -> StoredFile:
        """Removes a file that has expired. Raises ApiError 404 for it, and for what isn't there."""
        try:
            stored = StoredFile(**json.loads(meta.read_text()))
        except FileNotFoundError:
            raise ApiError(404, *_NOT_FOUND) from None
        if stored.expires_at is None or self._clock() < stored.expires_at:
            return stored
        meta.unlink(missing_ok=True)
        meta.with_suffix(".bin").unlink(missing_ok=True)
        raise ApiError(404, *_NOT_FOUND)

    def list(self, namespace: str, purpose: str | None = None) -> list[StoredFile]:
        """Newest first."""
        files: list[StoredFile] = []
        for meta in self._folder(namespace).glob("file-*.json"):
            with contextlib.suppress(ApiError):
                files.append(self.get(namespace, meta.stem))
        files = [file for file in files if purpose is None or file.purpose == purpose]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, namespace: str, file_id: str) -> None:
        meta = self._meta(namespace, file_id)
        try:
            meta.unlink()
        except FileNotFoundError:
            raise ApiError(404, *_NOT_FOUND) from None
        meta.with_suffix(".bin").unlink(missing_ok=True)


def check_purpose(purpose: object) -> str:
    """Raises ApiError 400."""
    if purpose not in PURPOSES or purpose == "batch_output":
        raise invalid("invalid_value", "'purpose' must be one of batch, vision, user_data.", "purpose")
    return str(purpose)


def check_expiry(anchor: object, seconds: object) -> int | None:
    """A lifetime in seconds, of the form's fields `expires_after[...]`. Raises ApiError 400."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("invalid_value", "The anchor must be created_at.", "expires_after.anchor")
    shortest, longest = LIFETIMES_S
    given = int(seconds) if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,8}", seconds) else 0
    if shortest <= given <= longest:
        return given
    raise invalid(
        "invalid_value", f"A file's lifetime is {shortest} to {longest} seconds.", "expires_after.seconds"
    )
