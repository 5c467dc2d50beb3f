"""Level 2 of the visual-token cache: in the blob store, shared by replicas, there after their restart.

Level 1 is the process's own `encoder.cache.VisualCache`. An entry says what it is and is checked on the way
back: one of another shape, type or encoder, or a damaged one, is a miss.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from workers.cluster.blobs import BlobStore, BlobStoreFull, open_store

VISUAL_TTL_S = 24 * 3600.0
VISUAL_CAP_BYTES = 1 << 30
_MAGIC = b"VLMV"
_VERSION = 1
_DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# magic, version, dtype, reserved, rows, width, sha256 of the revision, sha256 of the values
_HEADER = struct.Struct("<4sBBHII32s32s")
_EVICT_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class VisualFormat:
    """What a process computes and can use; part of an entry's name, so that unlike processes never meet."""

    revision: str  # of the encoder
    dtype: str  # float32 | bfloat16 | float16
    width: int  # d_model

    def entry(self, key: str) -> str:
        return f"{key}.{self.dtype}"


def pack(rows: Any, form: VisualFormat) -> bytes:
    """A header and the values, little-endian. rows: a tensor [n, width]. Raises ValueError."""
    import torch

    tensor = torch.as_tensor(rows).detach().cpu().contiguous()
    if tensor.ndim != 2 or not tensor.shape[0] or tensor.shape[1] != form.width:
        raise ValueError("visual tokens must be [n, width]")
    if str(tensor.dtype) != f"torch.{form.dtype}":
        raise ValueError("visual tokens are of another type")
    payload = tensor.view(torch.uint8).numpy().tobytes()
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _DTYPES[form.dtype],
        0,
        tensor.shape[0],
        form.width,
        hashlib.sha256(form.revision.encode()).digest(),
        hashlib.sha256(payload).digest(),
    )
    return header + payload


def unpack(data: bytes, form: VisualFormat, num_rows: int | None = None) -> Any:
    """A tensor [num_rows, width] on the CPU. Raises ValueError for all but a whole entry of `form`."""
    if len(data) < _HEADER.size:
        raise ValueError("an entry is shorter than its header")
    magic, version, dtype, reserved, rows, width, revision, digest = _HEADER.unpack_from(data)
    if (magic, version, reserved) != (_MAGIC, _VERSION, 0):
        raise ValueError("not visual tokens, or of another version")
    if (dtype, width) != (_DTYPES[form.dtype], form.width) or rows == 0 or num_rows not in (None, rows):
        raise ValueError("visual tokens of another shape or type")
    if revision != hashlib.sha256(form.revision.encode()).digest():
        raise ValueError("visual tokens of another encoder")
    payload = bytearray(memoryview(data)[_HEADER.size :])  # a tensor needs memory it may write
    if len(payload) != rows * width * _ITEM_BYTES[form.dtype]:
        raise ValueError("an entry is longer or shorter than its header says")
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("an entry is damaged")
    import torch

    return torch.frombuffer(payload, dtype=getattr(torch, form.dtype)).reshape(rows, width)


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
