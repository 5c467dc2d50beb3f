"""A WebP as the chunks that its first picture needs: profiles, EXIF and XMP decide over no pixel.

Source: https://developers.google.com/speed/webp/docs/riff_container.
"""

from __future__ import annotations

import struct

MAX_CHUNKS = 4_096
_EXTENDED, _FRAME, _EXIF = b"VP8X", b"ANMF", b"EXIF"
_PICTURE = {b"VP8 ", b"VP8L"}
_PIXEL_CHUNKS = {_EXTENDED, b"ANIM", _FRAME, b"ALPH"} | _PICTURE
_METADATA_FLAGS = 0x20 | 0x08 | 0x04  # of VP8X: profile, EXIF, XMP


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk. Raises ValueError, struct.error or IndexError."""
    kind = data[12:16]
    if kind == _EXTENDED:
        return _u24(data, 24) + 1, _u24(data, 27) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("no picture")


def read_webp(data: bytes) -> tuple[bytes, bytes]:
    """A WebP with the same first picture and nothing else, and the EXIF block.

    Raises ValueError for more chunks than any real file has.
    """
    view = memoryview(data)
    kept: list[bytes | memoryview] = []
    exif = b""
    at = 12
    has_picture = False
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        end = at + 8 + length
        padded_end = end + length % 2
        if kind == _EXTENDED and length > 0:
            flags = data[at + 8] & ~_METADATA_FLAGS
            kept += (view[at : at + 8], bytes((flags,)), view[at + 9 : padded_end])
        elif kind == _EXIF:
            exif = exif or data[at + 8 : end]
        elif kind in _PIXEL_CHUNKS and not has_picture:
            kept.append(view[at:padded_end])
            has_picture = kind == _FRAME or kind in _PICTURE
        at = padded_end
    else:
        raise ValueError("too many chunks")
    return b"".join((b"RIFF", struct.pack("<I", 4 + sum(map(len, kept))), b"WEBP", *kept)), exif


def _u24(data: bytes, offset: int) -> int:
    return data[offset] | data[offset + 1] << 8 | data[offset + 2] << 16
