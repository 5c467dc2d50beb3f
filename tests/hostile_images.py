"""Images that are valid, small on the wire and expensive to decode."""

from __future__ import annotations

import struct
from functools import cache


@cache
def many_scan_jpeg(side: int, num_scans: int) -> bytes:
    """A gray progressive JPEG whose every scan visits all blocks and changes nothing.

    side: pixels, a multiple of 8. Decoding time grows with side**2 * num_scans, the file only with num_scans.
    """
    num_blocks = (side // 8) ** 2
    out = bytearray(b"\xff\xd8")
    out += _segment(0xDB, bytes(1) + bytes([1] * 64))
    out += _segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + bytes((1, 0x11, 0)))
    out += _segment(0xC4, bytes((0x00,)) + bytes([1] + [0] * 15) + bytes((0,)))  # DC: "0" is category 0
    out += _segment(0xC4, bytes((0x10,)) + bytes([1] + [0] * 15) + bytes((0xE0,)))  # AC: "0" is EOB14
    out += _segment(0xDA, bytes((1, 1, 0x00, 0, 0, 0)))
    out += _bits("0" * num_blocks)
    ends = ""
    while num_blocks >= 1 << 14:
        run = min(num_blocks, (1 << 15) - 1)
        ends += "0" + format(run - (1 << 14), "014b")
        num_blocks -= run
    scan = _segment(0xDA, bytes((1, 1, 0x00, 1, 63, 0))) + _bits(ends)
    out += scan * num_scans
    return bytes(out + b"\xff\xd9")


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _bits(text: str) -> bytes:
    """Packed, filled up with ones, 0xFF stuffed as the format wants."""
    text += "1" * (-len(text) % 8)
    packed = int(text, 2).to_bytes(len(text) // 8, "big") if text else b""
    return packed.replace(b"\xff", b"\xff\x00")
