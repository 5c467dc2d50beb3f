"""What an engine keeps on disk, written behind: KV blocks and visual tokens."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llm.request import VisualKey
from llm.scheduling.blocks import BlockKey
from workers.contract.visual_format import VisualFormat, pack, unpack
from workers.local.disk_store import DiskStore

log = logging.getLogger(__name__)

_MAX_PENDING_BYTES = 256 << 20  # that wait to be written; what comes beyond is not kept


class DiskCache:
    """`BlockStore`, and visual tokens. Reading and writing have a thread each."""

    def __init__(self, folder: Path, cap_bytes: int, kv_identity: str, form: VisualFormat) -> None:
        """kv_identity: names all that a block's content depends on besides its key: weights and layout.

        Raises OSError where the folder can't be used.
        """
        self._store = DiskStore(folder, cap_bytes)
        self._kv = hashlib.sha256(kv_identity.encode()).hexdigest()[:32]
        self._visual = hashlib.sha256(f"{form.revision} {form.dtype} {form.width}".encode()).hexdigest()[:32]
        self._form = form
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk-write")
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._pending: set[str] = set()

    def close(self) -> None:
        """Returns when all that waits is written."""
        self._writer.shutdown()
        self._reader.shutdown()

    def has(self, key: BlockKey) -> bool:
        name = self._kv_name(key)
        return name in self._pending or self._store.has(name)

    def read(self, keys: list[BlockKey]) -> Future[list[bytes]]:
        return self._reader.submit(self._read, keys)

    def write(self, key: BlockKey, data: bytes) -> bool:
        return self._write_behind(self._kv_name(key), len(data), lambda: data)

    def visual(self, key: VisualKey) -> Any | None:
        """A tensor [n, width] of an image's visual tokens, read at once."""
        data = self._store.get(self._visual_name(key))
        try:
            return None if data is None else unpack(data, self._form)
        except ValueError:
            return None

    def keep_visual(self, key: VisualKey, rows: Any) -> None:
        name = self._visual_name(key)
        if not self._store.has(name):
            self._write_behind(name, rows.nbytes, lambda: pack(rows, self._form))

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    def _read(self, keys: list[BlockKey]) -> list[bytes]:
        found = []
        for key in keys:
            data = self._store.get(self._kv_name(key))
            if data is None:
                break
            found.append(data)
        return found

    def _write_behind(self, name: str, num_bytes: int, make: Callable[[], bytes]) -> bool:
        with self._lock:
            if name in self._pending or self._pending_bytes + num_bytes > _MAX_PENDING_BYTES:
                return name in self._pending
            self._pending_bytes += num_bytes
            self._pending.add(name)
        self._writer.submit(self._write, name, num_bytes, make)
        return True

    def _write(self, name: str, num_bytes: int, make: Callable[[], bytes]) -> None:
        try:
            self._store.put(name, make())
        except Exception:
            log.exception("the disk cache could not keep an entry")
        finally:
            with self._lock:
                self._pending_bytes -= num_bytes
                self._pending.discard(name)

    def _kv_name(self, key: BlockKey) -> str:
        return f"kv-{self._kv}-{key.hex()}"

    def _visual_name(self, key: VisualKey) -> str:
        return f"visual-{self._visual}-{hashlib.sha256(key.encode()).hexdigest()}"


def weights_digest(directory: Path) -> str:
    """64 hex digits of a checkpoint's weights and configuration. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")]):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
