"""Tiles as bytes: a fixed header, then the pixels. Nothing is trusted on the way back."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from preprocess.types import TileGrid, Tiles

_MAGIC = b"VLMT"
_VERSION = 1
_UINT8 = 1
# magic, version, dtype, thumbnail, reserved, rows, cols, tile height and width, number of tiles, sha256
_HEADER = struct.Struct("<4sBBBBHHIII32s")
_MAX_SIDE = 1 << 16


def to_bytes(tiles: Tiles) -> bytes:
    """Raises ValueError when pixels and grid don't agree."""
    grid, pixels = tiles.grid, np.ascontiguousarray(tiles.pixels)
    if pixels.dtype != np.uint8 or pixels.shape != _shape(grid):
        raise ValueError("tiles must be uint8 [num_tiles, tile_height, tile_width, 3]")
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        _UINT8,
        int(grid.thumbnail),
        0,
        grid.rows,
        grid.cols,
        grid.tile_height,
        grid.tile_width,
        grid.num_tiles,
        hashlib.sha256(pixels.data).digest(),
    )
    return b"".join((header, pixels.data))


def from_bytes(data: bytes | bytearray | memoryview, planned: TileGrid | None = None) -> Tiles:
    """A read-only view of `data`, no copy. Raises ValueError for anything `to_bytes` did not write, and for
    another grid than the planned one."""
    view = memoryview(data).cast("B").toreadonly()
    if len(view) < _HEADER.size:
        raise ValueError("tiles are shorter than their header")
    magic, version, dtype, thumbnail, reserved, rows, cols, height, width, num_tiles, digest = _HEADER.unpack(
        view[: _HEADER.size]
    )
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("not tiles, or of another version")
    if dtype != _UINT8 or thumbnail > 1 or reserved != 0:
        raise ValueError("tiles have an unknown layout")
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE) or (rows == 0) != (cols == 0):
        raise ValueError("tiles have an impossible grid")
    grid = TileGrid(rows, cols, bool(thumbnail), width, height)
    if planned is not None and grid != planned:
        raise ValueError("tiles of another grid")
    if num_tiles != grid.num_tiles or num_tiles == 0:
        raise ValueError("tiles don't fill their grid")
    payload = view[_HEADER.size :]
    if len(payload) != num_tiles * height * width * 3:
        raise ValueError("tiles are longer or shorter than their header says")
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("tiles are damaged")
    return Tiles(np.frombuffer(payload, dtype=np.uint8).reshape(_shape(grid)), grid)


def _shape(grid: TileGrid) -> tuple[int, int, int, int]:
    return (grid.num_tiles, grid.tile_height, grid.tile_width, 3)
