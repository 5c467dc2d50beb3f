"""How many visual tokens a tile costs. Torch-free, and the one owner of this rule."""

from __future__ import annotations

from dataclasses import dataclass


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
