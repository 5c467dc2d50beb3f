"""Tiles as bytes: a fixed header, then the pixels. Nothing is trusted on the way back.

The image's own size, which some grids have, doesn't travel: it says nothing of the pixels, and the reader
knows it from the planned grid.

Memory that nobody can change, and that never leaves its machine, goes without a digest ("sealed").
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from preprocess.types import TileGrid, Tiles

_MAGIC = b"VLMT"
_VERSION = 1
_UINT8 = 1
# magic, version, dtype, thumbnail, sealed, rows, cols, tile height and width, number of tiles, sha256
_HEADER = struct.Struct("<4sBBBBHHIII32s")
HEADER_BYTES = _HEADER.size
_MAX_SIDE = 1 << 16


def to_parts(tiles: Tiles, *, is_sealed: bool = False) -> tuple[bytes, memoryview]:
    """Header and pixels, which are not copied where they lie in one piece. Raises ValueError when pixels and
    grid don't agree.

    is_sealed: they are to be sealed, so there is no digest.
    """
    grid, pixels = tiles.grid, np.ascontiguousarray(tiles.pixels)
    if pixels.dtype != np.uint8 or pixels.shape != _shape(grid):
        raise ValueError("tiles must be uint8 [num_tiles, tile_height, tile_width, 3]")
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _UINT8,
        int(grid.thumbnail),
        int(is_sealed),
        grid.rows,
        grid.cols,
        grid.tile_height,
        grid.tile_width,
        grid.num_tiles,
        b"" if is_sealed else hashlib.sha256(pixels.data).digest(),
    )
    return header, pixels.data.cast("B")


def to_bytes(tiles: Tiles) -> bytes:
    """Raises ValueError as `to_parts` does."""
    return b"".join(to_parts(tiles))


def check_header(
    start: bytes | bytearray | memoryview, num_bytes: int, planned: TileGrid, *, is_sealed: bool = False
) -> None:
    """Whether `num_bytes` bytes that begin so can be tiles of this grid. Raises ValueError."""
    _read_header(memoryview(start).cast("B"), num_bytes, planned, is_sealed)


def from_bytes(
    data: bytes | bytearray | memoryview, planned: TileGrid | None = None, *, is_sealed: bool = False
) -> Tiles:
    """A read-only view of `data`, no copy. Raises ValueError for anything `to_parts` did not write, and for
    another grid than the planned one.

    is_sealed: the bytes lie in sealed memory, and have no digest.
    """
    view = memoryview(data).cast("B").toreadonly()
    grid, digest = _read_header(view, len(view), planned, is_sealed)
    payload = view[HEADER_BYTES:]
    if not is_sealed and hashlib.sha256(payload).digest() != digest:
        raise ValueError("tiles are damaged")
    return Tiles(np.frombuffer(payload, dtype=np.uint8).reshape(_shape(grid)), grid)


def _read_header(
    view: memoryview, num_bytes: int, planned: TileGrid | None, is_sealed: bool
) -> tuple[TileGrid, bytes]:
    """(grid, digest of the pixels)."""
    if len(view) < HEADER_BYTES:
        raise ValueError("tiles are shorter than their header")
    magic, version, dtype, thumbnail, sealed, rows, cols, height, width, num_tiles, digest = _HEADER.unpack(
        view[:HEADER_BYTES]
    )
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("not tiles, or of another version")
    if dtype != _UINT8 or thumbnail > 1 or sealed != is_sealed:
        raise ValueError("tiles have an unknown layout")
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE) or (rows == 0) != (cols == 0):
        raise ValueError("tiles have an impossible grid")
    image = (planned.image_width, planned.image_height) if planned is not None else (0, 0)
    grid = TileGrid(rows, cols, bool(thumbnail), width, height, *image)
    if planned is not None and grid != planned:
        raise ValueError("tiles of another grid")
    if num_tiles != grid.num_tiles or num_tiles == 0:
        raise ValueError("tiles don't fill their grid")
    if num_bytes - HEADER_BYTES != num_tiles * height * width * 3:
        raise ValueError("tiles are longer or shorter than their header says")
    return grid, digest


def _shape(grid: TileGrid) -> tuple[int, int, int, int]:
    return (grid.num_tiles, grid.tile_height, grid.tile_width, 3)
