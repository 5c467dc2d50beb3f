"""Where a TIFF's pages stand, and what their directories say that is needed for the pixels.

Every number in a directory is a stranger's: places and counts are held against the file before they are used.
Source: TIFF 6.0, section 2 and tags; BigTIFF's wider offsets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from preprocess.formats.damage import damage_is_refused, invalid_image
from preprocess.formats.file_bytes import FileBytes
from preprocess.types import ImageError

Buffer = bytes | FileBytes

INTEGERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}  # types
_SIZES = {1: (1, 2, 6, 7), 2: (3, 8), 4: (4, 9, 11, 13), 8: (5, 10, 12, 16, 17, 18)}
_TYPE_BYTES = {kind: size for size, kinds in _SIZES.items() for kind in kinds}

WIDTH, HEIGHT, COMPRESSION, ROWS_PER_STRIP, TILE_WIDTH, TILE_HEIGHT = 256, 257, 259, 278, 322, 323
STRIPS, TILES = (273, 279), (324, 325)  # offsets, byte counts
PHOTOMETRIC, WHITE_IS_ZERO, ORIENTATION = 262, 0, 274
FAX_COMPRESSIONS, OLD_JPEG = (2, 3, 4, 32771), 6
OLD_JPEG_STREAM = (513, 514)  # offset, byte count
OLD_JPEG_TABLES = (519, 520, 521)  # offsets of quantisation, DC and AC tables
_NEW_SUBFILE, _SUBFILE = 254, 255
_REDUCED_OR_MASK, _OLD_REDUCED = 1 | 4, 2  # bits of the one, the value of the other
PIXEL_TAGS = frozenset(
    (
        *(
            WIDTH,
            HEIGHT,
            258,
            COMPRESSION,
            PHOTOMETRIC,
            266,
            *STRIPS,
            274,
            277,
            ROWS_PER_STRIP,
            284,
            292,
            293,
            317,
        ),
        *(320, TILE_WIDTH, TILE_HEIGHT, *TILES, 332, 338, 339, 347, 512, *OLD_JPEG_STREAM, 515, 517, 518),
        *(*OLD_JPEG_TABLES, 529, 530, 531, 532, 50674),
    )
)
"""Tags without which pixels come out otherwise, or not at all. Pillow gets no other."""

_LONGEST_FILE = (1 << 63) - 1
MAX_ENTRIES = 4096  # of a directory
_NUM_KIND_ENTRIES = 8  # what a directory is stands among the first: entries are in order of their tags
_DIRECTORIES_PER_PAGE = 4
_MAX_CHUNKS = 1 << 18  # strips or tiles of a page
_MAX_VALUE_BYTES = 1 << 19  # of any other tag: a palette of 16 bits has 384 KiB


@dataclass(frozen=True, slots=True)
class TiffLayout:
    order: str  # "<" or ">"
    big: bool

    @property
    def count(self) -> str:
        return self.order + ("Q" if self.big else "H")

    @property
    def offset(self) -> str:
        return self.order + ("Q" if self.big else "I")

    @property
    def entry(self) -> str:
        """Tag, type, number of values; the values or their place follow."""
        return self.order + ("HHQ" if self.big else "HHI")

    @property
    def inline_bytes(self) -> int:
        return 8 if self.big else 4

    @property
    def first_offset_at(self) -> int:
        return 8 if self.big else 4

    @property
    def entry_bytes(self) -> int:
        return 20 if self.big else 12


@dataclass(frozen=True, slots=True)
class TiffEntry:
    tag: int
    kind: int
    count: int
    value: bytes  # the values themselves, wherever they stood

    def integers(self, layout: TiffLayout) -> tuple[int, ...]:
        """Raises ImageError `invalid_image` where there is none."""
        if self.kind not in INTEGERS or not self.count:
            raise invalid_image()
        return struct.unpack(f"{layout.order}{self.count}{INTEGERS[self.kind]}", self.value)


def is_tiff(head: Buffer) -> bool:
    return head[:4] in (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


def layout_of(data: Buffer) -> TiffLayout:
    if not is_tiff(data):
        raise invalid_image()
    head = data[:4]
    return TiffLayout("<" if head[:2] == b"II" else ">", b"+" in head)


@damage_is_refused()
def page_offsets(data: Buffer, max_pages: int) -> list[int]:
    """Where each page's directory stands; a broken chain ends at its last readable page.

    Smaller versions of a page and masks don't count as pages, unless there is nothing else. Raises ImageError
    `invalid_image` if there is none or an offset is that of no file, `too_many_pages` beyond `max_pages`.
    """
    layout = layout_of(data)
    pages: list[int] = []
    others: list[int] = []
    seen: set[int] = set()
    try:
        (offset,) = unpack(layout.offset, data, layout.first_offset_at)
        while offset and offset not in seen and len(seen) < _DIRECTORIES_PER_PAGE * max_pages:
            start, count = _directory(data, layout, offset)
            (next_offset,) = unpack(layout.offset, data, start + count * layout.entry_bytes)
            seen.add(offset)
            (others if _is_no_page(data, layout, start, count) else pages).append(offset)
            if next_offset > _LONGEST_FILE:
                raise invalid_image()
            if len(pages) > max_pages:
                raise ImageError("too_many_pages", f"The document has more than {max_pages} pages.")
            offset = next_offset
    except struct.error:
        pass
    if not pages and not others:
        raise invalid_image()
    return pages or others[:max_pages]


def unpack(form: str, data: Buffer, at: int) -> tuple[int, ...]:
    """Raises struct.error for a place outside the data, however large its number is."""
    if at > len(data):
        raise struct.error
    return struct.unpack(form, data[at : at + struct.calcsize(form)])


def pixel_entries(data: Buffer, layout: TiffLayout, offset: int) -> dict[int, TiffEntry]:
    """Entries by tag, those of PIXEL_TAGS; the first of several counts.

    Raises ImageError `invalid_image` for values that lie outside the file or are more than any page needs,
    and struct.error.
    """
    start, count = _directory(data, layout, offset)
    entries: dict[int, TiffEntry] = {}
    for at in range(start, start + count * layout.entry_bytes, layout.entry_bytes):
        tag, kind, number = unpack(layout.entry, data, at)
        if tag not in PIXEL_TAGS or tag in entries or kind not in _TYPE_BYTES:
            continue
        length = _TYPE_BYTES[kind] * number
        most = _MAX_CHUNKS * _TYPE_BYTES[kind] if tag in STRIPS + TILES else _MAX_VALUE_BYTES
        place = at + layout.entry_bytes - layout.inline_bytes
        if length > layout.inline_bytes:
            (place,) = unpack(layout.offset, data, place)
        if length > most or place + length > len(data):
            raise invalid_image()
        entries[tag] = TiffEntry(tag, kind, number, data[place : place + length])
    return entries


def _directory(data: Buffer, layout: TiffLayout, offset: int) -> tuple[int, int]:
    """(place of the first entry, number of entries)."""
    (count,) = unpack(layout.count, data, offset)
    if count > MAX_ENTRIES:
        raise struct.error
    return offset + struct.calcsize(layout.count), count


def _is_no_page(data: Buffer, layout: TiffLayout, start: int, count: int) -> bool:
    """A smaller version of a page, or its mask."""
    for index in range(min(count, _NUM_KIND_ENTRIES)):
        at = start + index * layout.entry_bytes
        tag, kind, _ = unpack(layout.entry, data, at)
        if tag in (_NEW_SUBFILE, _SUBFILE) and kind in INTEGERS:
            (value,) = unpack(
                layout.order + INTEGERS[kind], data, at + layout.entry_bytes - layout.inline_bytes
            )
            return bool(value & _REDUCED_OR_MASK) if tag == _NEW_SUBFILE else value == _OLD_REDUCED
    return False
