"""Tiling rules: pure arithmetic from (width, height) to a grid, so the cost of an image is known unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from preprocess.anyres import AnyResTiling, SquaredTiling
from preprocess.own_size import AreaResize, EdgeResize
from preprocess.types import Detail, ResizePlan, TileGrid, TilingRule, check_positive

_MAX_CANVAS_EDGE = 4096  # the family's own bound on the resized image


@dataclass(frozen=True, slots=True)
class Idefics3Tiling:
    """The rule of Idefics3 and SmolVLM: scale, round up to whole tiles, cut, add the whole image as a tile.

    Arithmetic, roundings included, as in transformers' Idefics3 and SmolVLM image processors.
    """

    tile_size: int
    longest_edge: int
    split: bool = True

    name: ClassVar[str] = "idefics3"

    def __post_init__(self) -> None:
        check_positive(tile_size=self.tile_size, longest_edge=self.longest_edge)

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        tile = self.tile_size
        scaled = self._scaled(width, height)
        if detail == "low" or not self.split:
            return ResizePlan(_one_tile(tile), (scaled, (tile, tile)), thumbnail_of_canvas=True)
        canvas_width, canvas_height = self._canvas(*scaled)
        rows, cols = canvas_height // tile, canvas_width // tile
        grid = TileGrid(rows, cols, True, tile, tile) if rows > 1 or cols > 1 else _one_tile(tile)
        return ResizePlan(grid, (scaled, (canvas_width, canvas_height)), thumbnail_of_canvas=True)

    def cuts_finely(self, detail: Detail) -> bool:
        return detail != "low"

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """The longer side becomes `longest_edge`; the other keeps the ratio, cut down and then made even."""
        ratio = width / height
        edge = self.longest_edge
        if width >= height:
            width, height = edge, _even(int(edge / ratio))
        else:
            width, height = _even(int(edge * ratio)), edge
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _MAX_CANVAS_EDGE:
            width, height = _MAX_CANVAS_EDGE, int(_MAX_CANVAS_EDGE / ratio)
        elif height > width and height > _MAX_CANVAS_EDGE:
            width, height = int(_MAX_CANVAS_EDGE * ratio), _MAX_CANVAS_EDGE
        return max(width, 1), max(height, 1)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """The longer side is rounded up to whole tiles, and the shorter one follows from the rounded one."""
        tile = self.tile_size
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(max(int(width / ratio), 1) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(max(int(height * ratio), 1) / tile) * tile
        return width, height


@dataclass(frozen=True, slots=True)
class AspectGridTiling:
    """The grid of `min_tiles` to `max_tiles` squares whose shape is nearest to the image's, plus a thumbnail.

    Among equally near grids the larger one is taken if the image fills more than half of it (the dynamic
    resolution of InternVL, https://arxiv.org/abs/2404.16821). An uncut image gets no thumbnail.
    """

    tile_size: int = 384
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True

    name: ClassVar[str] = "aspect_grid"

    def __post_init__(self) -> None:
        check_positive(tile_size=self.tile_size, min_tiles=self.min_tiles, max_tiles=self.max_tiles)
        if self.min_tiles > self.max_tiles:
            raise ValueError("min_tiles must not be above max_tiles")

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        tile = self.tile_size
        rows, cols = (1, 1) if detail == "low" else self._shape(width, height)
        if rows * cols == 1:
            return ResizePlan(_one_tile(tile), ((tile, tile),), thumbnail_of_canvas=False)
        grid = TileGrid(rows, cols, self.thumbnail, tile, tile)
        return ResizePlan(grid, ((cols * tile, rows * tile),), thumbnail_of_canvas=False)

    def cuts_finely(self, detail: Detail) -> bool:
        return detail != "low"

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """(rows, cols)"""
        best, best_distance = (1, 1), math.inf
        for rows, cols in self._shapes():
            distance = abs(width / height - cols / rows)
            fills = width * height > 0.5 * self.tile_size**2 * rows * cols
            if distance < best_distance or (distance == best_distance and fills):
                best, best_distance = (rows, cols), distance
        return best

    def _shapes(self) -> list[tuple[int, int]]:
        """Every (rows, cols) allowed, the fewest tiles first."""
        sides = range(1, self.max_tiles + 1)
        shapes = [(r, c) for r in sides for c in sides if self.min_tiles <= r * c <= self.max_tiles]
        return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


@dataclass(frozen=True, slots=True)
class SquashTiling:
    """The whole image squashed to one square; with detail "high", long images also in pieces of their own.

    The pieces lie along the long side ("pan and scan", Gemma 3's technical report, arXiv 2503.19786, 2.1):
    so many as the ratio of the sides, 2 to `max_crops`, none below `min_ratio` or smaller than `min_crop`.
    """

    tile_size: int
    min_crop: int = 256  # pixels
    max_crops: int = 4
    min_ratio: float = 1.2

    name: ClassVar[str] = "squash"

    def __post_init__(self) -> None:
        check_positive(tile_size=self.tile_size, min_crop=self.min_crop, max_crops=self.max_crops)

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        tile = self.tile_size
        boxes = self._boxes(width, height) if self.cuts_finely(detail) else ()
        if not boxes:
            return ResizePlan(_one_tile(tile), ((tile, tile),), thumbnail_of_canvas=False)
        rows, cols = (1, len(boxes)) if width >= height else (len(boxes), 1)
        return ResizePlan(TileGrid(rows, cols, True, tile, tile), (), thumbnail_of_canvas=False, boxes=boxes)

    def cuts_finely(self, detail: Detail) -> bool:
        return detail == "high"

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _boxes(self, width: int, height: int) -> tuple[tuple[int, int, int, int], ...]:
        """Roundings as in transformers' Gemma 3 image processor."""
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return ()
        count = min(math.floor(long / self.min_crop), math.floor(long / short + 0.5))
        count = min(max(2, count), self.max_crops)
        size = math.ceil(long / count)
        if min(size, short) < self.min_crop:
            return ()
        starts = [size * index for index in range(count)]
        if width >= height:
            return tuple((start, 0, min(start + size, width), height) for start in starts)
        return tuple((0, start, width, min(start + size, height)) for start in starts)


def tiling_from_json(raw: Mapping[str, object]) -> TilingRule:
    """The inverse of a rule's `to_json`. Raises ValueError for unknown rules and keys."""
    kinds = (
        Idefics3Tiling,
        AspectGridTiling,
        SquashTiling,
        AnyResTiling,
        SquaredTiling,
        AreaResize,
        EdgeResize,
    )
    rules = {rule.name: rule for rule in kinds}
    fields = dict(raw)
    name = fields.pop("rule", None)
    if name not in rules:
        raise ValueError(f"unknown tiling rule; known: {', '.join(sorted(rules))}")
    try:
        return rules[str(name)](**fields)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"missing or unknown key in tiling rule {name}") from None


def _one_tile(tile: int) -> TileGrid:
    return TileGrid(0, 0, True, tile, tile)


def _even(value: int) -> int:
    return value + value % 2
