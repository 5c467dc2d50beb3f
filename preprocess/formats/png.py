"""A PNG as the chunks that its pixels need: text, profiles and animation decide over no pixel.

Source: https://www.w3.org/TR/png-3/, section 5.
"""

from __future__ import annotations

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 65_536
MAX_METADATA_CHUNKS = 4_096

_GRAY, _RGB = 0, 2  # colour types
_TRNS_BYTES = {_GRAY: 2, _RGB: 6}


def read_png(data: bytes) -> tuple[bytes, bytes]:
    """A PNG with the same pixels and nothing else, and the EXIF block, wherever it stood.

    Raises ValueError for more chunks than any real file has.
    """
    kept: list[bytes | memoryview] = [SIGNATURE]
    view = memoryview(data)
    header = exif = b""
    num_metadata = 0
    at = len(SIGNATURE)
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if kind[0] & 0x20 == 0:  # critical
            kept.append(view[at:end])
            if kind == b"IHDR" and not header:
                header = data[at + 8 : at + 8 + length]
            if kind == b"IEND":
                break
        else:
            num_metadata += 1
            if num_metadata > MAX_METADATA_CHUNKS:
                raise ValueError("too many chunks")
            if kind in (b"tRNS", b"eXIf") and _is_sound(view[at + 4 : end]):
                body = data[at + 8 : end - 4]
                if kind == b"tRNS":
                    kept.append(_chunk(kind, _transparent_sample(header, body)))
                else:
                    exif = exif or body
        at = end
    else:
        raise ValueError("too many chunks")
    return b"".join(kept), exif


def _is_sound(kind_to_checksum: memoryview) -> bool:
    """Whether a chunk's checksum is right: readers drop an ancillary chunk whose one isn't."""
    return zlib.crc32(kind_to_checksum[:-4]).to_bytes(4, "big") == kind_to_checksum[-4:]


def _transparent_sample(header: bytes, body: bytes) -> bytes:
    """The colour that tRNS makes transparent, as Pillow will have it in its pixels: gray of fewer than 8 bits
    is spread over 0 to 255, and of RGB with 16 bits it keeps the high byte."""
    depth, colour = header[8:10]
    if len(body) != _TRNS_BYTES.get(colour):
        return body
    samples = [value & ((1 << depth) - 1) for value in struct.unpack(f">{len(body) // 2}H", body)]
    if colour == _RGB and depth == 16:
        samples = [value >> 8 for value in samples]
    elif 1 < depth < 8:
        samples = [value * 255 // ((1 << depth) - 1) for value in samples]
    return struct.pack(f">{len(samples)}H", *samples)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
