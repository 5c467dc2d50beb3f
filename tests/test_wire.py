"""Tiles as bytes: what is read back is what was written, and anything else is a ValueError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.types import TileGrid, Tiles
from preprocess.wire import from_bytes, to_bytes


def random_tiles(rows: int, cols: int, thumbnail: bool, width: int, height: int, seed: int = 0) -> Tiles:
    grid = TileGrid(rows, cols, thumbnail, width, height)
    shape = (grid.num_tiles, height, width, 3)
    return Tiles(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), grid)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_round_trip(rows: int, cols: int, thumbnail: bool, width: int, height: int) -> None:
    tiles = random_tiles(rows, cols, thumbnail, width, height)
    back = from_bytes(to_bytes(tiles))
    assert back.grid == tiles.grid
    assert np.array_equal(back.pixels, tiles.pixels)
    assert back.pixels.dtype == np.uint8 and not back.pixels.flags.writeable


def test_single_global_tile_round_trips() -> None:
    tiles = random_tiles(0, 0, True, 8, 8)
    assert np.array_equal(from_bytes(bytearray(to_bytes(tiles))).pixels, tiles.pixels)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, change: int) -> None:
    data = bytearray(to_bytes(random_tiles(1, 2, True, 4, 4)))
    data[position % len(data)] ^= change
    with pytest.raises(ValueError, match="tiles"):
        from_bytes(data)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="tiles"):
        from_bytes(data)
    with pytest.raises(ValueError, match="tiles"):
        from_bytes(b"VLMT\x01" + data)


@pytest.mark.parametrize("change", [-1, 1, 48])
def test_shorter_and_longer_bytes_are_refused(change: int) -> None:
    data = to_bytes(random_tiles(1, 1, True, 4, 4))
    with pytest.raises(ValueError, match="longer or shorter"):
        from_bytes(data[:change] if change < 0 else data + bytes(change))


@pytest.mark.parametrize(
    "planned", [TileGrid(2, 1, True, 4, 4), TileGrid(1, 2, False, 4, 4), TileGrid(1, 2, True, 4, 8)]
)
def test_tiles_of_another_grid_than_planned_are_refused(planned: TileGrid) -> None:
    tiles = random_tiles(1, 2, True, 4, 4)
    assert from_bytes(to_bytes(tiles), tiles.grid).grid == tiles.grid
    with pytest.raises(ValueError, match="another grid"):
        from_bytes(to_bytes(tiles), planned)


def test_writing_pixels_that_do_not_fit_the_grid_is_refused() -> None:
    grid = TileGrid(1, 1, False, 4, 4)
    for pixels in (np.zeros((2, 4, 4, 3), np.uint8), np.zeros((1, 4, 4, 3), np.float32)):
        with pytest.raises(ValueError, match="uint8"):
            to_bytes(Tiles(pixels, grid))


def test_non_contiguous_pixels_are_written_in_reading_order() -> None:
    tiles = random_tiles(1, 2, False, 4, 4)
    flipped = Tiles(tiles.pixels[::-1], tiles.grid)
    assert np.array_equal(from_bytes(to_bytes(flipped)).pixels, tiles.pixels[::-1])
