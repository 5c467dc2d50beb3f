"""One page of a TIFF as a classic TIFF of one page, without decoding a pixel.

A page keeps its strips or tiles and the tags that shape its pixels, so that it passes the one decode path
like any other image, and Pillow reads nothing else of what the file says.
"""

from __future__ import annotations

import struct

from preprocess.formats.damage import damage_is_refused, invalid_image
from preprocess.formats.tiff import (
    COMPRESSION,
    FAX_COMPRESSIONS,
    HEIGHT,
    OLD_JPEG,
    OLD_JPEG_STREAM,
    OLD_JPEG_TABLES,
    ROWS_PER_STRIP,
    STRIPS,
    TILE_HEIGHT,
    TILE_WIDTH,
    TILES,
    Buffer,
    TiffEntry,
    TiffLayout,
    layout_of,
    pixel_entries,
)
from preprocess.types import ImageError

_COMPRESSIONS = {*FAX_COMPRESSIONS, OLD_JPEG, 1, 5, 7, 8, 32773, 32946, 34925, 50000}
_NUMBERS = (COMPRESSION, HEIGHT, ROWS_PER_STRIP, TILE_WIDTH, TILE_HEIGHT)
_LONG, _LONG8 = 4, 16  # types
_HEADER_BYTES = 8
_QUANTISATION_BYTES, _HUFFMAN_COUNTS = 64, 16


@damage_is_refused()
def one_page(data: bytes, offset: int, max_pixels: int) -> bytes:
    """The whole file, with a header that leads to a directory of the page at `offset` behind its end.

    max_pixels: of a tile. Raises ImageError `invalid_image`, `unsupported_image_format`.
    """
    layout = layout_of(data)
    entries = pixel_entries(data, layout, offset)
    numbers = {tag: entries[tag].integers(layout)[0] for tag in _NUMBERS if tag in entries}
    if numbers.get(COMPRESSION, 1) not in _COMPRESSIONS:
        raise ImageError(
            "unsupported_image_format",
            "The TIFF's compression is not supported. Accepted are none, CCITT fax, LZW, deflate, PackBits, "
            "JPEG, LZMA and Zstandard.",
        )
    if numbers.get(TILE_WIDTH, 0) * numbers.get(TILE_HEIGHT, 0) > max_pixels:
        raise invalid_image()
    if numbers.get(ROWS_PER_STRIP, 0) > numbers.get(HEIGHT, 0):
        # any number may stand for "all rows", and a decoder would make room for so many
        entries[ROWS_PER_STRIP] = entries[HEIGHT]
    padding = bytes(len(data) % 2)
    at = len(data) + len(padding)
    directory = _directory(layout, entries, {}, at)
    return b"".join((_header(layout, at), memoryview(data)[_HEADER_BYTES:], padding, directory))


@damage_is_refused()
def page_file(data: Buffer, offset: int, max_bytes: int) -> bytes:
    """The page whose directory stands at `offset`, without the rest of the file.

    Raises ImageError `invalid_image`, `image_too_large`.
    """
    layout = layout_of(data)
    entries = pixel_entries(data, layout, offset)
    pieces = _Pieces(data, max_bytes, sum(len(entry.value) for entry in entries.values()))
    moved = _chunks(layout, entries, pieces)
    if COMPRESSION in entries and entries[COMPRESSION].integers(layout)[0] == OLD_JPEG:
        moved |= _old_jpeg(layout, entries, pieces)
    return _header(layout, _HEADER_BYTES) + _directory(layout, entries, moved, _HEADER_BYTES)


class _Pieces:
    """Copies of parts of a file, up to so many bytes in sum: directories may name a part many times."""

    def __init__(self, data: Buffer, max_bytes: int, num_bytes: int) -> None:
        self._data = data
        self._max_bytes = max_bytes
        self._num_bytes = num_bytes

    def take(self, start: int, count: int) -> bytes:
        """Raises ImageError `invalid_image` beyond the file, `image_too_large`."""
        self._num_bytes += count
        if self._num_bytes > self._max_bytes:
            raise ImageError("image_too_large", f"The image has more than {self._max_bytes} bytes.")
        if start + count > len(self._data):
            raise invalid_image()
        return self._data[start : start + count]

    def take_rest(self, start: int) -> bytes:
        return self.take(start, max(0, len(self._data) - start))


def _chunks(layout: TiffLayout, entries: dict[int, TiffEntry], pieces: _Pieces) -> dict[int, list[bytes]]:
    """Strips or tiles, under the tag of their offsets."""
    tags = next((tags for tags in (STRIPS, TILES) if tags[0] in entries), None)
    if tags is None or tags[1] not in entries:
        raise invalid_image()
    starts, sizes = (entries[tag].integers(layout) for tag in tags)
    return {tags[0]: [pieces.take(start, size) for start, size in zip(starts, sizes, strict=True)]}


def _old_jpeg(layout: TiffLayout, entries: dict[int, TiffEntry], pieces: _Pieces) -> dict[int, list[bytes]]:
    """The stream or the tables beside the strips, each under the tag of its offset (TIFF 6.0, section 22)."""
    moved: dict[int, list[bytes]] = {}
    offset_tag, count_tag = OLD_JPEG_STREAM
    if offset_tag in entries:
        start = entries[offset_tag].integers(layout)[0]
        count = entries[count_tag].integers(layout)[0] if count_tag in entries else 0
        stream = pieces.take(start, count) if count else pieces.take_rest(start)
        moved[offset_tag] = [stream]
        entries[count_tag] = TiffEntry(count_tag, _LONG, 1, struct.pack(layout.order + "I", len(stream)))
    for tag in OLD_JPEG_TABLES:
        if tag in entries:
            moved[tag] = []
            for start in entries[tag].integers(layout):
                if tag == OLD_JPEG_TABLES[0]:
                    moved[tag].append(pieces.take(start, _QUANTISATION_BYTES))
                else:
                    counts = pieces.take(start, _HUFFMAN_COUNTS)
                    moved[tag].append(counts + pieces.take(start + len(counts), sum(counts)))
    return moved


def _header(layout: TiffLayout, directory_at: int) -> bytes:
    return (b"II" if layout.order == "<" else b"MM") + struct.pack(layout.order + "HI", 42, directory_at)


def _directory(
    layout: TiffLayout, entries: dict[int, TiffEntry], moved: dict[int, list[bytes]], at: int
) -> bytes:
    """A directory to stand at the even offset `at`, values that don't fit into it, then what was moved:
    pieces whose new offsets are the values of their tags."""
    order = layout.order
    out = bytearray(2 + 12 * len(entries) + 4)
    struct.pack_into(order + "H", out, 0, len(entries))
    places: dict[int, int] = {}  # of values, in `out`
    for index, tag in enumerate(sorted(entries)):
        entry = entries[tag]
        kind, count, value = entry.kind, entry.count, entry.value
        if tag in moved:
            kind, count, value = _LONG, len(moved[tag]), bytes(4 * len(moved[tag]))
        elif kind == _LONG8:  # which classic TIFF lacks
            kind, value = _LONG, struct.pack(f"{order}{count}I", *entry.integers(layout))
        place = places[tag] = 2 + 12 * index + 8
        struct.pack_into(order + "HHI", out, place - 8, tag, kind, count)
        if len(value) > 4:
            places[tag] = _append(out, value)
            struct.pack_into(order + "I", out, place, at + places[tag])
        else:
            out[place : place + len(value)] = value
    for tag, pieces in moved.items():
        starts = [at + _append(out, piece) for piece in pieces]
        struct.pack_into(f"{order}{len(starts)}I", out, places[tag], *starts)
    return bytes(out)


def _append(out: bytearray, piece: bytes) -> int:
    """Where it stands now: at an even place."""
    out += bytes(len(out) % 2)
    out += piece
    return len(out) - len(piece)
