"""Visual tokens as bytes: a header that says what they are, then the values; checked on the way back."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

_MAGIC = b"VLMV"
_VERSION = 1
_DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# magic, version, dtype, reserved, rows, width, sha256 of the revision, sha256 of the values
_HEADER = struct.Struct("<4sBBHII32s32s")


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
