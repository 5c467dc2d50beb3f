"""Rules for towers that take an image whole, at a size of its own: one tile, not cut.

A rule says how many pixels an image becomes; `capped` lowers that by the rule's own arithmetic, so that every
cap is a setting which the checkpoint's own processor could have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from preprocess.types import Detail, ResizePlan, TileGrid, TilingRule, check_positive

LOW_DETAIL_PIXELS = 512**2


@dataclass(frozen=True, slots=True)
class AreaResize:
    """Both sides multiples of `factor`, the area between two bounds, the ratio nearly kept.

    Arithmetic, roundings included, as in `smart_resize` of transformers' Qwen2-VL image processor, and with
    `grows_sides` as in PaddleOCR-VL's, which first brings the shorter side up to `factor`, or with
    `grows_whole` as in GLM-4.6V's, which rounds both sides down then. The area exceeds `max_pixels` only
    where one side is `factor` already.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    grows_sides: bool = False
    grows_whole: bool = False

    name: ClassVar[str] = "area"

    def __post_init__(self) -> None:
        check_positive(factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        rule = self if self.cuts_finely(detail) else self.capped(LOW_DETAIL_PIXELS)
        return _whole(*rule._size(width, height))

    def cuts_finely(self, detail: Detail) -> bool:
        return detail != "low"

    def capped(self, max_pixels: int) -> AreaResize:
        most = min(self.max_pixels, max_pixels)
        return replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most))

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Python's rounding is to even, as the reference's is."""
        factor = self.factor
        if self.grows_sides and height < factor:
            width, height = round(width * factor / height), factor
        if self.grows_sides and width < factor:
            width, height = factor, round(height * factor / width)

        if self.grows_whole and min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)

        def fit(shape: Callable[[float], int], scale: float) -> tuple[int, int]:
            return shape(width / scale / factor) * factor, shape(height / scale / factor) * factor

        new_width, new_height = fit(round, 1)
        if new_width * new_height > self.max_pixels:
            new_width, new_height = fit(math.floor, math.sqrt(height * width / self.max_pixels))
        elif new_width * new_height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            new_width = math.ceil(width * scale / factor) * factor
            new_height = math.ceil(height * scale / factor) * factor
        return max(new_width, factor), max(new_height, factor)


@dataclass(frozen=True, slots=True)
class EdgeResize:
    """Down until the longer side is at most `longest_edge`, then each side up to a multiple; never enlarged.

    Arithmetic as in transformers' Pixtral image processor. With `max_pixels` above 0 the longest edge is the
    largest whose result has no more: the cap of an area by the family's own means.
    """

    longest_edge: int
    multiple: int
    min_side: int = 1  # pixels of the result
    max_pixels: int = 0

    name: ClassVar[str] = "edge"

    def __post_init__(self) -> None:
        check_positive(longest_edge=self.longest_edge, multiple=self.multiple, min_side=self.min_side)
        if self.max_pixels:
            check_positive(max_pixels=self.max_pixels)

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid:
        return self.plan(width, height, detail).grid

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan:
        """width, height: of the upright image, in pixels."""
        check_positive(width=width, height=height)
        rule = self if self.cuts_finely(detail) else self.capped(LOW_DETAIL_PIXELS)
        return _whole(*rule._size(width, height))

    def cuts_finely(self, detail: Detail) -> bool:
        return detail != "low"

    def capped(self, max_pixels: int) -> EdgeResize:
        return replace(self, max_pixels=min(filter(None, (self.max_pixels, max_pixels))))

    def to_json(self) -> dict[str, object]:
        return {"rule": self.name, **asdict(self)}

    def _size(self, width: int, height: int) -> tuple[int, int]:
        size = self._within(width, height, self.longest_edge)
        if not self.max_pixels or size[0] * size[1] <= self.max_pixels:
            return size
        low, high = 1, self.longest_edge  # the result's area grows with the edge: at `high` it is too large
        while high - low > 1:
            middle = (low + high) // 2
            size = self._within(width, height, middle)
            low, high = (middle, high) if size[0] * size[1] <= self.max_pixels else (low, middle)
        return self._within(width, height, low)

    def _within(self, width: int, height: int, edge: int) -> tuple[int, int]:
        ratio = max(height / edge, width / edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return self._up(width), self._up(height)

    def _up(self, side: int) -> int:
        return max(side, self.min_side) + -max(side, self.min_side) % self.multiple


def capped(rule: TilingRule, max_pixels: int) -> TilingRule:
    """The rule with no more pixels an image than this; a rule of fixed tiles is what it was."""
    return rule.capped(max_pixels) if isinstance(rule, AreaResize | EdgeResize) else rule


def _whole(width: int, height: int) -> ResizePlan:
    return ResizePlan(TileGrid(0, 0, True, width, height), ((width, height),), thumbnail_of_canvas=False)
