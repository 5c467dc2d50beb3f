"""An image's tiles on their way from the preprocess stage to the engine, wherever they lie meanwhile."""

from __future__ import annotations

from typing import Protocol

from preprocess.types import TileGrid, Tiles
from preprocess.wire import HEADER_BYTES, check_header, from_bytes, to_bytes
from workers.contract.sealed_memory import SealedMemory


class TilesLost(Exception):
    """The tiles are gone or damaged and must be made anew."""


class TilesHandle(Protocol):
    """Closed when nobody needs the tiles where they lie. `open` and `wire` may block."""

    @property
    def grid(self) -> TileGrid:
        """As planned; who decodes the tiles holds them to it."""
        ...

    def open(self) -> Tiles:
        """Verified. Raises TilesLost."""
        ...

    def wire(self) -> bytes | memoryview:
        """In the format of `preprocess.wire`, unverified. Raises TilesLost."""
        ...

    def close(self) -> None: ...


class MadeTiles:
    """Of this process's own making."""

    def __init__(self, tiles: Tiles) -> None:
        self.grid = tiles.grid
        self._tiles = tiles

    def open(self) -> Tiles:
        return self._tiles

    def wire(self) -> bytes:
        return to_bytes(self._tiles)

    def close(self) -> None:
        return


class ReceivedTiles:
    """Bytes in wire format from another process."""

    def __init__(self, data: bytes, grid: TileGrid) -> None:
        """Raises ValueError for what can't be tiles of this grid."""
        check_header(data, len(data), grid)
        self.grid = grid
        self._data = data

    def open(self) -> Tiles:
        try:
            return from_bytes(self._data, self.grid)
        except ValueError:
            raise TilesLost from None

    def wire(self) -> bytes:
        return self._data

    def close(self) -> None:
        return


class SealedTiles:
    """In memory that every process of this machine may map and none can change."""

    def __init__(self, descriptor: int, grid: TileGrid) -> None:
        """Takes `descriptor` over. Raises ValueError for what can't be tiles of this grid."""
        self.memory = SealedMemory(descriptor)
        self.grid = grid
        try:
            start = self.memory.start(HEADER_BYTES)
            check_header(start, self.memory.num_bytes, grid, is_sealed=True)
        except ValueError:
            self.close()
            raise

    def open(self) -> Tiles:
        return from_bytes(self.memory.map(), self.grid, is_sealed=True)

    def wire(self) -> bytes:
        return to_bytes(self.open())

    def close(self) -> None:
        self.memory.close()
