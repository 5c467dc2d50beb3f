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
    """A SigLIP tower without its pooling head, and its connector: what decides their FLOPs and bytes."""

    geometry: VisionGeometry
    num_layers: int
    width: int
    intermediate: int  # width of the MLP's hidden layer
    d_model: int  # the decoder's width
    connector: Literal["pixel_shuffle", "average_pool", "mlp"] = "pixel_shuffle"
    connector_intermediate: int = 0  # hidden width of the mlp connector
    extra_positions: int = 0  # per tile, beside its patches: a class token
    nominal_params: int = 0  # above 0: stands in for patch_params, as in "400M"

    @property
    def patch_params(self) -> int:
        """Parameters that multiply every patch: blocks with biases and norms, and the patch embedding."""
        if self.nominal_params:
            return self.nominal_params
        attention = 4 * (self.width * self.width + self.width)
        mlp = 2 * self.width * self.intermediate + self.intermediate + self.width
        norms = 4 * self.width
        patch_embedding = self.width * (3 * self.geometry.patch_size**2 + 1)
        return self.num_layers * (attention + mlp + norms) + patch_embedding + 2 * self.width

    @property
    def connector_params(self) -> int:
        """Parameters that multiply every visual token."""
        if self.connector == "average_pool":
            return (self.width + 1) * self.d_model
        joined = self.width * self.geometry.reduction**2
        if self.connector == "mlp":
            hidden = self.connector_intermediate
            return (joined + 1) * hidden + (hidden + 1) * self.d_model
        return joined * self.d_model

    @property
    def num_params(self) -> int:
        positions = self.geometry.patches_per_tile * self.width
        return self.patch_params + positions + self.connector_params

    def flops(self, num_tiles: int) -> float:
        """2 P N + 4 L N^2 d per tile with bidirectional attention, and the connector's product."""
        positions = self.geometry.patches_per_tile + self.extra_positions
        linear = 2 * self.patch_params * positions
        attention = 4 * self.num_layers * positions**2 * self.width
        connector = 2 * self.connector_params * self.geometry.tokens_per_tile
        return float(num_tiles * (linear + attention + connector))

    def elements(self, num_tiles: int) -> int:
        """Channels of every patch in every layer: what norms and activations pass over."""
        return self.geometry.num_patches(num_tiles) * self.num_layers * self.width

    def weight_bytes(self, element_bytes: float = 2) -> int:
        return math.ceil(self.num_params * element_bytes)

    def output_bytes(self, num_tiles: int, element_bytes: float = 2) -> int:
        """Bytes of the visual tokens that are cached and sent to the decoder."""
        return math.ceil(self.geometry.num_visual_tokens(num_tiles) * self.d_model * element_bytes)
