"""Uploaded images: sent once, asked about by id. Bounded in bytes and in time.

An id is made of the namespace and the content, so it can neither be guessed for another caller's image nor
mean other bytes later.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vlm.config import MEBIBYTE, ServeConfig
from vlm.requests.errors import ApiError
from workers.cluster.blobs import BlobStore, BlobStoreFull, BlobStoreUnavailable, open_store

MISSING = "This image is not stored (any more). Upload it again, then repeat the request."


def image_id(namespace: str, sha256: str) -> str:
    fields = (b"image-1", namespace.encode(), sha256.encode())
    digest = hashlib.sha256(b"".join(len(f).to_bytes(8, "big") + f for f in fields))
    return f"img-{digest.hexdigest()[:32]}"


def not_found(param: str | None = None) -> ApiError:
    return ApiError(404, "image_not_found", MISSING, param)


@dataclass(frozen=True, slots=True)
class KeptImage:
    data: bytes
    created_at: float  # Unix time
    expires_at: float


class Images(Protocol):
    async def put(self, namespace: str, sha256: str, data: bytes) -> tuple[str, KeptImage]:
        """The id and what is kept; an image that is there already lives on. Raises ApiError 413 or 503."""
        ...

    async def entry(self, namespace: str, image_id: str, param: str | None = None) -> KeptImage:
        """Raises ApiError 404."""
        ...

    async def read(self, namespace: str, image_id: str, param: str | None = None) -> bytes: ...

    async def delete(self, namespace: str, image_id: str) -> None:
        """Raises ApiError 404."""
        ...


class MemoryImages:
    """Of one server. At its cap the least recently used go. Used from one event loop."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], KeptImage] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, namespace: str, sha256: str, data: bytes) -> tuple[str, KeptImage]:
        if len(data) > self._max_bytes:
            raise ApiError(413, "image_too_large", "The image is larger than the image store.")
        key = (namespace, image_id(namespace, sha256))
        now = self._clock()
        self._remove(key)
        self._expire(now)
        while self.num_bytes + len(data) > self._max_bytes:
            self._remove(next(iter(self._entries)))
        entry = self._entries[key] = KeptImage(data, now, now + self._ttl_s)
        self.num_bytes += len(data)
        return key[1], entry

    async def entry(self, namespace: str, image_id: str, param: str | None = None) -> KeptImage:
        self._expire(self._clock())
        entry = self._entries.get((namespace, image_id))
        if entry is None:
            raise not_found(param)
        self._entries.move_to_end((namespace, image_id))
        return entry

    async def read(self, namespace: str, image_id: str, param: str | None = None) -> bytes:
        return (await self.entry(namespace, image_id, param)).data

    async def delete(self, namespace: str, image_id: str) -> None:
        await self.entry(namespace, image_id)
        self._remove((namespace, image_id))

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= len(entry.data)

    def _expire(self, now: float) -> None:
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._remove(key)


_TIMES = struct.Struct("!dd")  # created, expires


class BlobImages:
    """Shared by all servers of one blob store. At its cap the store refuses."""

    def __init__(self, blobs: BlobStore, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._clock = clock

    @staticmethod
    def _key(namespace: str, image_id: str) -> str:
        return f"image:{hashlib.sha256(namespace.encode()).hexdigest()[:32]}:{image_id}"

    async def put(self, namespace: str, sha256: str, data: bytes) -> tuple[str, KeptImage]:
        stored_id = image_id(namespace, sha256)
        now = self._clock()
        entry = KeptImage(data, now, now + self._ttl_s)
        blob = _TIMES.pack(entry.created_at, entry.expires_at) + data
        try:
            await asyncio.to_thread(self._blobs.put, self._key(namespace, stored_id), blob, self._ttl_s)
        except BlobStoreFull:
            raise ApiError(
                503, "image_store_full", "The image store is full. Please try again later.", retry_after_s=60
            ) from None
        except BlobStoreUnavailable:
            raise _unavailable() from None
        return stored_id, entry

    async def entry(self, namespace: str, image_id: str, param: str | None = None) -> KeptImage:
        try:
            found = await asyncio.to_thread(self._read, namespace, image_id)
        except BlobStoreUnavailable:
            raise _unavailable() from None
        if found is None:
            raise not_found(param)
        return found

    def _read(self, namespace: str, stored_id: str) -> KeptImage | None:
        """What is there under the id but is not its image goes."""
        key = self._key(namespace, stored_id)
        blob = self._blobs.get(key)
        if blob is None:
            return None
        data = blob[_TIMES.size :]
        if image_id(namespace, hashlib.sha256(data).hexdigest()) != stored_id:
            self._blobs.delete(key)
            return None
        return KeptImage(data, *_TIMES.unpack(blob[: _TIMES.size]))

    async def read(self, namespace: str, image_id: str, param: str | None = None) -> bytes:
        return (await self.entry(namespace, image_id, param)).data

    async def delete(self, namespace: str, image_id: str) -> None:
        await self.entry(namespace, image_id)
        try:
            await asyncio.to_thread(self._blobs.delete, self._key(namespace, image_id))
        except BlobStoreUnavailable:
            raise _unavailable() from None


def _unavailable() -> ApiError:
    return ApiError(503, "image_store_unavailable", "The image store is unavailable.", retry_after_s=5)


def open_images(config: ServeConfig) -> Images:
    """In the blob store where one is shared, in this process otherwise."""
    url = config.store or config.broker
    if not url:
        return MemoryImages(config.image_store_mb * MEBIBYTE, config.image_ttl_s)
    return BlobImages(open_store(url), config.image_ttl_s)
