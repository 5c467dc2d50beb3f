"""The values that travel through preprocessing: what is known of an image, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Detail = Literal["auto", "low", "high"]
Variant = Literal["fast", "exact"]


class ImageError(ValueError):
    """An image this service will not process. `message` is a fixed text, safe to show a client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What the header tells, without decoding a pixel."""

    sha256: str  # 64 hex digits of the file's bytes: the image's identity
    format: str  # "JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"
    width: int  # after EXIF orientation
    height: int  # after EXIF orientation
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How an image is cut. `rows == cols == 0` means that the whole image is one global tile."""

    rows: int
    cols: int
    thumbnail: bool  # a global tile follows the rows * cols cut ones
    tile_width: int
    tile_height: int

    @property
    def num_tiles(self) -> int:
        return self.rows * self.cols + int(self.thumbnail)


class TilingRule(Protocol):
    """A pure function of (width, height, detail)."""

    def grid(self, width: int, height: int, detail: Detail = "auto") -> TileGrid: ...

    def to_json(self) -> dict[str, object]:
        """A description from which `tiling_from_json` makes an equal rule; part of the cache key."""
        ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """Cut tiles in reading order, the thumbnail last: uint8 [num_tiles, tile_height, tile_width, 3]."""

    pixels: np.ndarray
    grid: TileGrid
