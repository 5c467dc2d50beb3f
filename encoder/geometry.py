"""What a tile costs: visual tokens, FLOPs and bytes of tower and connector. Torch-free.

The one owner of tokens per tile: others multiply nothing, they ask `num_visual_tokens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """The tower's patch grid and the connector's reduction of it, per side."""

    image_size: int  # pixels, square tiles
    patch_size: int  # pixels
    reduction: int  # patches joined per side: 2 means 4:1

    @property
    def grid_side(self) -> int:
        """Patches per side; what does not fill a patch is dropped, as the tower's convolution does."""
        return self.image_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        return self.grid_side**2

    @property
    def tokens_per_tile(self) -> int:
        """Odd grids pool with ceil: 27x27 at 2x2 gives 14x14."""
        return (-(-self.grid_side // self.reduction)) ** 2

    def num_patches(self, num_tiles: int) -> int:
        """Positions that the tower computes."""
        return num_tiles * self.patches_per_tile

    def num_visual_tokens(self, num_tiles: int) -> int:
        """Positions that the decoder sees."""
        return num_tiles * self.tokens_per_tile


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What of a tower and its connector decides their FLOPs and bytes."""

    geometry: VisionGeometry
    num_layers: int
    width: int
    patch_params: int  # multiply every patch: blocks and the patch embedding
    table_params: int = 0  # held, added and never multiplied: positions
    connector_params: int = 0  # multiply every visual token
    d_model: int = 0  # the decoder's width

    @classmethod
    def of(
        cls,
        geometry: VisionGeometry,
        num_layers: int,
        width: int,
        intermediate: int,
        d_model: int,
        connector: Literal["pixel_shuffle", "average_pool", "mlp"] = "pixel_shuffle",
        connector_intermediate: int = 0,
    ) -> TowerShape:
        """A SigLIP tower without its pooling head, biases and norms counted, and one of our connectors."""
        attention = 4 * (width * width + width)
        mlp = 2 * width * intermediate + intermediate + width
        block = attention + mlp + 4 * width  # two layer norms
        patch_embedding = width * (3 * geometry.patch_size**2 + 1)
        joined = width if connector == "average_pool" else width * geometry.reduction**2
        if connector == "mlp":
            connector_params = (joined + 1) * connector_intermediate + (connector_intermediate + 1) * d_model
        else:
            connector_params = joined * d_model + (d_model if connector == "average_pool" else 0)
        return cls(
            geometry=geometry,
            num_layers=num_layers,
            width=width,
            patch_params=num_layers * block + patch_embedding + 2 * width,
            table_params=geometry.patches_per_tile * width,
            connector_params=connector_params,
            d_model=d_model,
        )

    @property
    def num_params(self) -> int:
        return self.patch_params + self.table_params + self.connector_params

    def flops(self, num_tiles: int) -> float:
        """2 P N + 4 L N^2 d per tile with bidirectional attention, and the connector's product."""
        patches = self.geometry.patches_per_tile
        linear = 2 * self.patch_params * patches
        attention = 4 * self.num_layers * patches**2 * self.width
        connector = 2 * self.connector_params * self.geometry.tokens_per_tile
        return float(num_tiles * (linear + attention + connector))

    def weight_bytes(self, element_bytes: float = 2) -> int:
        return math.ceil(self.num_params * element_bytes)

    def output_bytes(self, num_tiles: int, element_bytes: float = 2) -> int:
        """Bytes of the visual tokens that are cached and sent to the decoder."""
        return math.ceil(self.geometry.num_visual_tokens(num_tiles) * self.d_model * element_bytes)
