"""What an image costs: visual tokens, FLOPs and bytes of tower and connector. Torch-free.

The one owner of visual token counts: others multiply nothing, they ask `VisionGeometry.rows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from encoder.packing import Packing, TiledCanvas


class Grid(TiledCanvas, Protocol):
    """Tiles of one image: so many, of one size in pixels."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def tile_width(self) -> int: ...

    @property
    def tile_height(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TileShape:
    """A plain `Grid`."""

    num_tiles: int
    tile_width: int  # pixels
    tile_height: int  # pixels
    rows: int = 0  # unknown, as the image is
    cols: int = 0
    image_width: int = 0
    image_height: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> TileShape:
        """Of tiles [n, H, W, 3]."""
        num_tiles, height, width = shape[:3]
        return cls(num_tiles, width, height)


TYPICAL_IMAGE = TileShape(1, 1008, 756)
"""Stands for an image where each is one tile of its own size and none is at hand: a photo on a page."""


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """The tower's patch grid and the connector's reduction of it, per side.

    What does not fill a patch is dropped, as the tower's convolution does. Patches that don't fill a cell are
    pooled with ceil in a square tile, 27x27 at 2x2 to 14x14, and dropped in an image of its own size.
    """

    image_size: int  # pixels of square tiles; 0: each image is one tile of its own size
    patch_size: int  # pixels
    reduction: int  # patches joined per side: 2 means 4:1
    packing: Packing | None = None  # of an image's tokens, once all its tiles are encoded

    @property
    def grid_side(self) -> int:
        """Patches per side of a square tile."""
        return self.image_size // self.patch_size

    @property
    def cell_size(self) -> int:
        """Pixels per side of what becomes one visual token."""
        return self.patch_size * self.reduction

    @property
    def patches_per_tile(self) -> int:
        """0 where each image has its own size."""
        return self.grid_side**2

    @property
    def tokens_per_tile(self) -> int:
        """0 where each image has its own size."""
        return self._cells(self.image_size) ** 2

    def squares(self, num_tiles: int) -> TileShape:
        """So many tiles of the tower's own size."""
        return TileShape(num_tiles, self.image_size, self.image_size)

    def num_patches(self, grid: Grid) -> int:
        """Positions that the tower computes."""
        patches = (grid.tile_height // self.patch_size) * (grid.tile_width // self.patch_size)
        return grid.num_tiles * patches

    def rows(self, grid: Grid) -> int:
        """Visual tokens: positions that the decoder sees; of tiles without their image, `tile_rows`."""
        if self.packing is not None and grid.image_width:
            return self.packing.num_rows(self._cells(self.image_size), grid)
        return self.tile_rows(grid)

    def tile_rows(self, grid: Grid) -> int:
        """Tokens that the connector makes."""
        return grid.num_tiles * self._cells(grid.tile_height) * self._cells(grid.tile_width)

    def cells(self, grid: Grid) -> tuple[int, int]:
        """(rows, columns) of a tile's visual tokens."""
        return self._cells(grid.tile_height), self._cells(grid.tile_width)

    def _cells(self, pixels: int) -> int:
        patches = pixels // self.patch_size
        return -(-patches // self.reduction) if self.image_size else patches // self.reduction


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A tower without its pooling head, and its connector: what decides their FLOPs and bytes."""

    geometry: VisionGeometry
    num_layers: int
    width: int
    intermediate: int  # width of the MLP's hidden layer
    d_model: int  # the decoder's width
    connector: Literal["pixel_shuffle", "average_pool", "mlp", "gated_mlp"] = "pixel_shuffle"
    connector_intermediate: int = 0  # hidden width of the mlp connector
    merged: bool = False  # that connector first takes joined patches to one's width
    gated: bool = False  # the MLP has two linears in and one out
    extra_positions: int = 0  # per tile, beside its patches: a class token
    table: int = 0  # rows of a position table that is stretched over images of any size
    window: int = 0  # patches per side that see each other alone, in all but `full_layers` layers; 0: all do
    full_layers: int = 0
    joined_layers: int = 1  # layers whose outputs the connector reads side by side
    row_sets: int = 1  # connectors: one, and one for each further set of rows
    nominal_params: int = 0  # above 0: stands in for patch_params, as in "400M"

    @property
    def patch_params(self) -> int:
        """Parameters that multiply every patch: blocks with biases and norms, and the patch embedding."""
        if self.nominal_params:
            return self.nominal_params
        attention = 4 * (self.width * self.width + self.width)
        linears = 3 if self.gated else 2
        mlp = linears * self.width * self.intermediate + (linears - 1) * self.intermediate + self.width
        norms = 4 * self.width
        patch_embedding = self.width * (3 * self.geometry.patch_size**2 + 1)
        return self.num_layers * (attention + mlp + norms) + patch_embedding + 2 * self.width

    @property
    def connector_params(self) -> int:
        """Parameters that multiply every visual token."""
        if self.connector == "average_pool":
            return (self.width + 1) * self.d_model
        joined = self.width * self.joined_layers * self.geometry.reduction**2
        if self.connector == "gated_mlp":
            d = self.d_model
            return (joined + 1) * d + d * d + 2 * d + 3 * d * self.connector_intermediate
        if self.connector == "mlp":
            hidden = self.connector_intermediate
            merging = joined * self.width if self.merged else 0
            read = self.width if self.merged else joined
            return self.row_sets * (merging + (read + 1) * hidden + (hidden + 1) * self.d_model)
        return joined * self.d_model

    @property
    def num_params(self) -> int:
        positions = (self.table or self.geometry.patches_per_tile) * self.width
        return self.patch_params + positions + self.connector_params

    def flops(self, grid: Grid) -> float:
        """2 P N + 4 L N^2 d per tile with bidirectional attention, N^2 less by windows, and the connector's
        product."""
        patches, tiles = self.geometry.num_patches(grid), grid.num_tiles
        positions = patches + tiles * self.extra_positions
        linear = 2 * self.patch_params * positions
        attention = 4 * self._pairs(grid) * self.width
        connector = 2 * self.connector_params * self.geometry.tile_rows(grid)
        return float(linear + attention + connector)

    def _pairs(self, grid: Grid) -> int:
        """Queries times the keys that they see, over all layers and tiles."""
        high, wide = grid.tile_height // self.geometry.patch_size, grid.tile_width // self.geometry.patch_size
        everything = (high * wide + self.extra_positions) ** 2
        if not self.window:
            return grid.num_tiles * self.num_layers * everything
        inside = _squares(high, self.window) * _squares(wide, self.window)
        windowed = self.num_layers - self.full_layers
        return grid.num_tiles * (self.full_layers * everything + windowed * inside)

    def elements(self, grid: Grid) -> int:
        """Channels of every patch in every layer: what norms and activations pass over."""
        return self.geometry.num_patches(grid) * self.num_layers * self.width

    def weight_bytes(self, element_bytes: float = 2) -> int:
        return math.ceil(self.num_params * element_bytes)

    def output_bytes(self, grid: Grid) -> int:
        """Bytes, at 16 bits a number, of the visual tokens that are cached and sent to the decoder."""
        return 2 * self.geometry.rows(grid) * self.row_sets * self.d_model


def _squares(length: int, window: int) -> int:
    """Sum of the squares of a side's parts: windows, and what is left."""
    return length // window * window**2 + (length % window) ** 2
