"""The values that travel through preprocessing: what is known of an image, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Detail = Literal["auto", "low", "high"]
Variant = Literal["fast", "exact"]


def check_positive(**values: int) -> None:
    """Raises ValueError with the name of a value that is no positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer")


class ImageError(ValueError):
    """An image this service will not process. `message` is a fixed text, safe to show a client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What the header says, without decoding a pixel."""

    sha256: str  # 64 hex digits of the file's bytes: the image's identity
    format: str  # "JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"
    width: int  # after EXIF orientation
    height: int  # after EXIF orientation
    num_bytes: int
    num_pages: int = 1  # above 1 only for TIFF; an animation is its first frame


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How an image is cut. `rows == cols == 0` means that the whole image is one global tile."""

    rows: int
    cols: int
    thumbnail: bool  # a global tile follows the rows * cols cut ones
    tile_width: int
    tile_height: int
    image_width: int = 0  # pixels, where visual tokens are packed by the image's own ratio; else 0
    image_height: int = 0

    @property
    def num_tiles(self) -> int:
        return self.rows * self.cols + int(self.thumbnail)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its fields in order; the image's size only where there is one, which older readers don't know."""
        tiles = (self.rows, self.cols, self.thumbnail, self.tile_width, self.tile_height)
        return (*tiles, self.image_width, self.image_height) if self.image_width else tiles


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """How pixels get from the image to the grid: each step resizes the one before it.

    The last step is the canvas, or is laid on it: cols * tile_width x rows * tile_height, or one tile if the
    image isn't cut.
    """

    grid: TileGrid
    steps: tuple[tuple[int, int], ...]  # (width, height)
    thumbnail_of_canvas: bool  # the thumbnail shrinks the canvas; otherwise the image itself
    canvas: tuple[int, int] | None = None
    """(width, height) of a black canvas that holds the last step in its middle; None: the step is it."""
    square: tuple[int, int, int] | None = None
    """The colour of a square that holds the image itself in its middle, before the first step."""
    boxes: tuple[tuple[int, int, int, int], ...] = ()
    """(left, top, right, bottom) of the image itself, one a cut tile, in place of cells of a canvas."""


class TilingRule(Protocol):
    """A pure function of (width, height, detail)."""

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid: ...

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ResizePlan: ...

    def cuts_finely(self, detail: Detail) -> bool:
        """Whether this detail cuts an image as "high" does; otherwise it is one tile, as with "low"."""
        ...

    def to_json(self) -> dict[str, object]:
        """A description from which `tiling_from_json` makes an equal rule; part of the cache key."""
        ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """Cut tiles in reading order, the thumbnail last: uint8 [num_tiles, tile_height, tile_width, 3]."""

    pixels: np.ndarray
    grid: TileGrid
