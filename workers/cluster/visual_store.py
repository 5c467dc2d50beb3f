"""Level 2 of the visual-token cache: in the blob store, shared by replicas, there after their restart.

Level 1 is the process's own `encoder.cache.VisualCache`. An entry of another shape, type or encoder, or a
damaged one, is a miss.
"""

from __future__ import annotations

from typing import Any

from workers.cluster.blobs import BlobStore, BlobStoreFull, open_store
from workers.contract.visual_format import VisualFormat, pack, unpack

VISUAL_TTL_S = 24 * 3600.0
VISUAL_CAP_BYTES = 1 << 30
_EVICT_AT_ONCE = 8


class VisualStore:
    """Entries by key, least recently used first out at the cap. Raises `BlobStoreUnavailable`."""

    def __init__(self, blobs: BlobStore, form: VisualFormat, ttl_s: float = VISUAL_TTL_S) -> None:
        self._blobs = blobs
        self._ttl_s = ttl_s
        self.form = form

    def get(self, key: str, num_rows: int | None = None) -> Any | None:
        """A tensor [num_rows, width]; what is there but isn't that is removed and a miss."""
        name = self.form.entry(key)
        data = self._blobs.get(name)
        if data is None:
            return None
        try:
            rows = unpack(data, self.form, num_rows)
        except ValueError:
            self._blobs.delete(name)
            return None
        self._blobs.renew(name, self._ttl_s)
        return rows

    def has(self, key: str) -> bool:
        return self._blobs.exists(self.form.entry(key))

    def put(self, key: str, rows: Any) -> None:
        """Makes room by forgetting what was not used for longest. Raises `BlobStoreFull`."""
        name, data = self.form.entry(key), pack(rows, self.form)
        while True:
            try:
                self._blobs.put(name, data, self._ttl_s)
                return
            except BlobStoreFull:
                old = self._blobs.oldest(_EVICT_AT_ONCE)
                if not old:
                    raise
                for victim in old:
                    self._blobs.delete(victim)


def open_visual_blobs(url: str, patience_s: float = 0.0) -> BlobStore:
    """The blob store of level 2, with an account of its own."""
    return open_store(url, VISUAL_CAP_BYTES, patience_s, prefix="vlm:visual")
