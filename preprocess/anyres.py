"""The rule of LLaVA-NeXT ("any resolution"): the image keeps its ratio on one of a list of canvases.

The canvas is black where the image doesn't reach, and is cut into tiles; the whole image, squashed to a
tile, comes last. Visual tokens of the margins are dropped later by the image's own size, which the grid has.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from preprocess.types import Detail, ResizePlan, TileGrid, TilingRule, check_positive


@dataclass(frozen=True, slots=True)
class AnyResTiling:
    """Arithmetic, roundings included, as transformers' `select_best_resolution` and `get_patch_output_size`.

    An image so thin that it vanishes on every canvas, which these refuse, gets the first one.
    """

    tile_size: int
    canvases: tuple[tuple[int, int], ...]  # (height, width) in pixels, multiples of tile_size
    margins: tuple[int, int, int] | None = None
    """Colour of the squares in which images of a chat with several are one tile each; None: they are as
    one alone."""

    name: ClassVar[str] = "anyres"

    def __post_init__(self) -> None:
        check_positive(tile_size=self.tile_size)
        canvases = tuple((height, width) for height, width in self.canvases)
        object.__setattr__(self, "canvases", canvases)  # lists, where they come out of JSON
        if self.margins is not None:
            object.__setattr__(self, "margins", tuple(self.margins))
        if not canvases:
            raise ValueError("there must be at least one canvas")
        for side in (side for canvas in canvases for side in canvas):
            check_positive(canvas=side)
            if side % self.tile_size:
                raise ValueError(f"canvases must be multiples of {self.tile_size} pixels")

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        tile = self.tile_size
        if detail == "low":
            grid = TileGrid(0, 0, True, tile, tile, width, height)
            return ResizePlan(grid, ((tile, tile),), thumbnail_of_canvas=False)
        high, wide = self._canvas(width, height)
        grid = TileGrid(high // tile, wide // tile, True, tile, tile, width, height)
        fitted = _fitted(width, height, wide, high)
        return ResizePlan(grid, (fitted,), thumbnail_of_canvas=False, canvas=(wide, high))

    def cuts_finely(self, detail: Detail) -> bool:
        return detail != "low"

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) where most of the image's pixels survive, the smallest of equals."""
        best, most, least_waste = self.canvases[0], 0, math.inf
        for high, wide in self.canvases:
            scale = min(wide / width, high / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            waste = high * wide - kept
            if kept > most or (kept == most and kept and waste < least_waste):
                best, most, least_waste = (high, wide), kept, waste
        return best


@dataclass(frozen=True, slots=True)
class SquaredTiling:
    """One tile: the image in the middle of a square of one colour, shrunk or grown.

    How LLaVA-OneVision takes an image that is not the only one.
    """

    tile_size: int
    margins: tuple[int, int, int]  # their colour

    name: ClassVar[str] = "squared"

    def __post_init__(self) -> None:
        check_positive(tile_size=self.tile_size)
        object.__setattr__(self, "margins", tuple(self.margins))  # a list, where it comes out of JSON

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        tile = self.tile_size
        grid = TileGrid(0, 0, True, tile, tile, width, height)
        return ResizePlan(grid, ((tile, tile),), thumbnail_of_canvas=False, square=self.margins)

    def cuts_finely(self, detail: Detail) -> bool:
        return False

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}


def among(rule: TilingRule, num_images: int) -> TilingRule:
    """The rule for an image of a chat that has so many."""
    if num_images < 2 or not isinstance(rule, AnyResTiling) or rule.margins is None:
        return rule
    return SquaredTiling(rule.tile_size, rule.margins)


def _fitted(width: int, height: int, wide: int, high: int) -> tuple[int, int]:
    """(width, height) of the image within wide x high pixels."""
    by_width, by_height = wide / width, high / height
    if by_width < by_height:
        return wide, min(math.ceil(height * by_width), high)
    return min(math.ceil(width * by_height), wide), high
