"""Pages of a TIFF as files of their own, without decoding a pixel.

A page keeps its strips or tiles and the tags that shape its pixels, so that it passes the one decode path
like any other image. Source: TIFF 6.0, section 2; BigTIFF's wider offsets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap

from preprocess.probe import invalid_image
from preprocess.types import ImageError

Buffer = bytes | mmap

_TYPE_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_INTEGERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}
_DATA_TAGS = {273: 279, 324: 325}  # offsets -> byte counts: strips, tiles
_OTHER_OFFSET_TAGS = {330, 34665, 34853, 40965, 513, 514, 519, 520, 521, 288, 289}
"""Tags that point outside the directory: none is needed for the pixels, old-style JPEG excepted."""
_COMPRESSION, _OLD_JPEG = 259, 6
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class _Entry:
    tag: int
    kind: int
    count: int
    value: bytes  # the values themselves, wherever they stood


@dataclass(frozen=True, slots=True)
class _Layout:
    order: str  # "<" or ">"
    big: bool

    @property
    def inline_bytes(self) -> int:
        return 8 if self.big else 4


def is_tiff(head: Buffer) -> bool:
    return bytes(head[:4]) in (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


def page_offsets(data: Buffer, max_pages: int) -> list[int]:
    """Where each page's directory stands; a broken chain ends at its last readable page.

    Raises ImageError `invalid_image` if there is none, `too_many_pages` beyond `max_pages`.
    """
    layout = _layout(data)
    offsets: list[int] = []
    seen: set[int] = set()
    try:
        (offset,) = struct.unpack_from(
            layout.order + ("Q" if layout.big else "I"), data, 8 if layout.big else 4
        )
        while offset and offset not in seen:
            next_at, _ = _directory(data, layout, offset)
            if len(offsets) >= max_pages:
                raise ImageError("too_many_pages", f"The document has more than {max_pages} pages.")
            seen.add(offset)
            offsets.append(offset)
            (offset,) = struct.unpack_from(layout.order + ("Q" if layout.big else "I"), data, next_at)
    except struct.error:
        pass
    if not offsets:
        raise invalid_image()
    return offsets


def page_file(data: Buffer, offset: int, max_bytes: int) -> bytes:
    """The page whose directory stands at `offset`, as a classic one-page TIFF.

    Raises ImageError `invalid_image`, `image_too_large`, `unsupported_pixel_format`.
    """
    layout = _layout(data)
    try:
        entries = {entry.tag: entry for entry in _entries(data, layout, offset)}
        if _first(layout, entries.get(_COMPRESSION)) == _OLD_JPEG:
            raise ImageError("unsupported_pixel_format", "The image's pixel format is not supported.")
        chunks_tag = next((tag for tag in _DATA_TAGS if tag in entries), None)
        if chunks_tag is None or _DATA_TAGS[chunks_tag] not in entries:
            raise invalid_image()
        starts = _integers(layout, entries[chunks_tag])
        sizes = _integers(layout, entries[_DATA_TAGS[chunks_tag]])
        if sum(sizes) + sum(len(entry.value) for entry in entries.values()) > max_bytes:
            raise ImageError("image_too_large", f"The image has more than {max_bytes} bytes.")
        if len(starts) != len(sizes) or any(s + n > len(data) for s, n in zip(starts, sizes, strict=True)):
            raise invalid_image()
        chunks = [bytes(data[s : s + n]) for s, n in zip(starts, sizes, strict=True)]
        kept = [entry for tag, entry in sorted(entries.items()) if tag not in _OTHER_OFFSET_TAGS]
        return _write(layout, kept, chunks_tag, chunks)
    except struct.error:
        raise invalid_image() from None


def _layout(data: Buffer) -> _Layout:
    if not is_tiff(data):
        raise invalid_image()
    head = bytes(data[:4])
    return _Layout("<" if head[:2] == b"II" else ">", b"+" in head)


def _directory(data: Buffer, layout: _Layout, offset: int) -> tuple[int, int]:
    """(position of the next directory's offset, number of entries)."""
    (count,) = struct.unpack_from(layout.order + ("Q" if layout.big else "H"), data, offset)
    if count > _MAX_ENTRIES:
        raise struct.error
    return offset + (8 + count * 20 if layout.big else 2 + count * 12), count


def _entries(data: Buffer, layout: _Layout, offset: int) -> Iterator[_Entry]:
    _, count = _directory(data, layout, offset)
    step, start = (20, offset + 8) if layout.big else (12, offset + 2)
    for index in range(count):
        at = start + index * step
        tag, kind, number = struct.unpack_from(layout.order + ("HHQ" if layout.big else "HHI"), data, at)
        if kind not in _TYPE_BYTES:
            continue
        length = _TYPE_BYTES[kind] * number
        at += 12 if layout.big else 8
        if length > layout.inline_bytes:
            (at,) = struct.unpack_from(layout.order + ("Q" if layout.big else "I"), data, at)
        if at + length > len(data):
            raise invalid_image()
        yield _Entry(tag, kind, number, bytes(data[at : at + length]))


def _integers(layout: _Layout, entry: _Entry) -> tuple[int, ...]:
    if entry.kind not in _INTEGERS:
        raise invalid_image()
    return struct.unpack(f"{layout.order}{entry.count}{_INTEGERS[entry.kind]}", entry.value)


def _first(layout: _Layout, entry: _Entry | None) -> int | None:
    return _integers(layout, entry)[0] if entry and entry.count and entry.kind in _INTEGERS else None


def _write(layout: _Layout, entries: list[_Entry], chunks_tag: int, chunks: list[bytes]) -> bytes:
    """Header, directory, values that don't fit into it, then the pixels' chunks."""
    order = layout.order
    directory_bytes = 2 + 12 * len(entries) + 4
    rewritten: list[_Entry] = []
    for entry in entries:
        if entry.tag == chunks_tag:
            entry = _Entry(entry.tag, 4, len(chunks), b"\0" * 4 * len(chunks))
        elif entry.kind == 16:  # BigTIFF integers, which classic TIFF lacks
            values = _integers(layout, entry)
            entry = _Entry(entry.tag, 4, len(values), struct.pack(f"{order}{len(values)}I", *values))
        rewritten.append(entry)
    places: dict[int, int] = {}
    position = 8 + directory_bytes
    for entry in rewritten:
        if len(entry.value) > 4:
            position += position % 2
            places[entry.tag] = position
            position += len(entry.value)
    starts: list[int] = []
    for chunk in chunks:
        position += position % 2
        starts.append(position)
        position += len(chunk)
    out = bytearray(position)
    out[:8] = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8)
    struct.pack_into(order + "H", out, 8, len(rewritten))
    for index, entry in enumerate(rewritten):
        value = struct.pack(f"{order}{len(starts)}I", *starts) if entry.tag == chunks_tag else entry.value
        at = 10 + 12 * index
        struct.pack_into(order + "HHI", out, at, entry.tag, entry.kind, entry.count)
        if entry.tag in places:
            struct.pack_into(order + "I", out, at + 8, places[entry.tag])
            out[places[entry.tag] : places[entry.tag] + len(value)] = value
        else:
            out[at + 8 : at + 8 + len(value)] = value
    for start, chunk in zip(starts, chunks, strict=True):
        out[start : start + len(chunk)] = chunk
    return bytes(out)
