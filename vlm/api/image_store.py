"""Uploaded images: sent once, asked about by id. Bounded in bytes and time; the least recently used go first.

An id is made of the namespace and the content, so it can neither be guessed for another caller's image nor
mean other bytes later.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vlm.api.errors import ApiError

MISSING = "This image is not stored (any more). Upload it again, then repeat the request."


def image_id(namespace: str, sha256: str) -> str:
    fields = (b"image-1", namespace.encode(), sha256.encode())
    digest = hashlib.sha256(b"".join(len(f).to_bytes(8, "big") + f for f in fields))
    return f"img-{digest.hexdigest()[:32]}"


def not_found(param: str | None = None) -> ApiError:
    return ApiError(404, "image_not_found", MISSING, param)


@dataclass(slots=True)
class Entry:
    data: bytes
    created_at: float
    expires_at: float


class ImageStore:
    """In memory. Used from one event loop; methods are async so that a shared store can take its place."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, namespace: str, sha256: str, data: bytes) -> tuple[str, Entry]:
        """The id and what is kept; an image that is there already lives longer. Raises ApiError 413."""
        if len(data) > self._max_bytes:
            raise ApiError(413, "image_too_large", "The image is larger than the image store.")
        key = (namespace, image_id(namespace, sha256))
        now = self._clock()
        self._remove(key)
        self._expire(now)
        while self.num_bytes + len(data) > self._max_bytes:
            self._remove(next(iter(self._entries)))
        entry = self._entries[key] = Entry(data, now, now + self._ttl_s)
        self.num_bytes += len(data)
        return key[1], entry

    async def entry(self, namespace: str, image_id: str, param: str | None = None) -> Entry:
        """Raises ApiError 404."""
        self._expire(self._clock())
        entry = self._entries.get((namespace, image_id))
        if entry is None:
            raise not_found(param)
        self._entries.move_to_end((namespace, image_id))
        return entry

    async def read(self, namespace: str, image_id: str, param: str | None = None) -> bytes:
        return (await self.entry(namespace, image_id, param)).data

    async def delete(self, namespace: str, image_id: str) -> None:
        """Raises ApiError 404."""
        await self.entry(namespace, image_id)
        self._remove((namespace, image_id))

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= len(entry.data)

    def _expire(self, now: float) -> None:
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._remove(key)
