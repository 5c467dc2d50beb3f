"""A GIF from its first picture on: comments and application data decide over no pixel.

Source: GIF89a specification, sections 23 to 26.
"""

from __future__ import annotations

MAX_BLOCKS = 65_536  # before the picture; of up to 255 bytes each
_EXTENSION, _PICTURE, _GRAPHIC_CONTROL = 0x21, 0x2C, 0xF9
_CONTROL_BYTES = 4
_HEADER_BYTES = 13


def read_gif(data: bytes) -> bytes:
    """A GIF with the same first picture. Raises ValueError or IndexError where there is none."""
    view = memoryview(data)
    at = _HEADER_BYTES + (3 * (2 << (data[10] & 7)) if data[10] & 0x80 else 0)
    kept = [view[:at]]
    blocks_left = MAX_BLOCKS
    while data[at] != _PICTURE:
        start = at
        at += 1
        if data[start] == _EXTENSION:
            at += 1
            while data[at]:
                at += data[at] + 1
                blocks_left -= 1
            at += 1
            if data[start + 1] == _GRAPHIC_CONTROL and data[start + 2] >= _CONTROL_BYTES:
                kept.append(view[start:at])
        blocks_left -= 1
        if blocks_left < 0:
            raise ValueError("too many blocks")
    return b"".join((*kept, view[at:])) if len(kept[0]) < at else data
