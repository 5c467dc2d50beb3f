"""TIFFs of any tags, for what Pillow does not write."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

SHORT, LONG, LONG8 = 3, 4, 16
_FORMATS = {1: "B", 2: "B", SHORT: "H", LONG: "I", LONG8: "Q"}

Tags = Mapping[int, tuple[int, Sequence[int]]]  # tag -> type, values


@dataclass(frozen=True)
class Page:
    """`pieces`: tag -> what its values are the offsets of."""

    tags: Tags
    pieces: Mapping[int, Sequence[bytes]] = field(default_factory=dict)


def strips(tags: Tags, chunks: Sequence[bytes]) -> Page:
    counts = (LONG, [len(chunk) for chunk in chunks])
    return Page({**tags, 279: counts}, {273: chunks})


def gray(width: int, height: int, more: Tags | None = None, value: int = 7) -> Page:
    """One strip, not compressed."""
    tags = {256: (LONG, [width]), 257: (LONG, [height]), 258: (SHORT, [8]), 259: (SHORT, [1])}
    tags |= {262: (SHORT, [1]), 277: (SHORT, [1]), 278: (LONG, [height])}
    return strips({**tags, **(more or {})}, [bytes([value]) * (width * height)])


def tiff_file(*pages: Page, order: str = "<", big: bool = False) -> bytes:
    offset, entry, count, inline = ("Q", "HHQ", "Q", 8) if big else ("I", "HHI", "H", 4)
    out = bytearray(16 if big else 8)
    pointer_at = 8 if big else 4
    for page in pages:
        tags = dict(page.tags)
        for tag, pieces in page.pieces.items():
            places = []
            for piece in pieces:
                out += bytes(len(out) % 2)
                places.append(len(out))
                out += piece
            tags[tag] = (LONG, places)
        directory = struct.pack(order + count, len(tags))
        for tag, (kind, values) in sorted(tags.items()):
            packed = struct.pack(f"{order}{len(values)}{_FORMATS[kind]}", *values)
            if len(packed) > inline:
                out += bytes(len(out) % 2)
                place = len(out)
                out += packed
                packed = struct.pack(order + offset, place)
            directory += struct.pack(order + entry, tag, kind, len(values)) + packed.ljust(inline, b"\0")
        out += bytes(len(out) % 2)
        struct.pack_into(order + offset, out, pointer_at, len(out))
        out += directory + bytes(inline)
        pointer_at = len(out) - inline
    magic = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "H", 43 if big else 42)
    out[: len(magic)] = magic
    if big:
        struct.pack_into(order + "HH", out, 4, 8, 0)
    return bytes(out)


def old_jpeg(image: Image.Image, whole: bool) -> Page:
    """Old-style JPEG: the whole stream beside its strip, or only its tables. Sides are multiples of 16."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=80, subsampling=2)
    stream = buffer.getvalue()
    tables: dict[tuple[int, int], bytes] = {}  # (marker and class, number) -> table
    at = 2
    while stream[at + 1] != 0xDA:
        marker, length = stream[at + 1], int.from_bytes(stream[at + 2 : at + 4], "big")
        body = stream[at + 4 : at + 2 + length]
        while marker in (0xDB, 0xC4) and body:
            size = 65 if marker == 0xDB else 17 + sum(body[1:17])
            tables[marker + (body[0] >> 4), body[0] & 15] = body[1:size]
            body = body[size:]
        at += 2 + length
    scan_at = at + 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
    scan = stream[scan_at:-2]
    tags: Tags = {
        256: (LONG, [image.width]),
        257: (LONG, [image.height]),
        258: (SHORT, [8, 8, 8]),
        259: (SHORT, [6]),
        262: (SHORT, [6]),
        277: (SHORT, [3]),
        278: (LONG, [image.height]),
        279: (LONG, [len(scan)]),
        530: (SHORT, [2, 2]),
    }
    if whole:
        return Page({**tags, 514: (LONG, [len(stream)])}, {273: [scan], 513: [stream]})
    pieces = {519: 0xDB, 520: 0xC4, 521: 0xC5}
    numbers = (0, 1, 1)  # of the three components
    return Page(
        {**tags, 512: (SHORT, [1])},
        {273: [scan], **{tag: [tables[marker, n] for n in numbers] for tag, marker in pieces.items()}},
    )
