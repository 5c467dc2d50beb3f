"""Visual tokens of an image that keeps its ratio on a canvas of tiles, as rows of the image itself.

Tokens of the canvas's margins are dropped, a newline token ends each row, and the whole image's tile comes
first (LLaVA-NeXT). Torch-free arithmetic, and the tensors' part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TiledCanvas(Protocol):
    """Tiles in rows and columns, and the size in pixels of the image that they show."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def image_width(self) -> int: ...

    @property
    def image_height(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Packing:
    """`most_tiles`: an image of more tokens than so many tiles have is shrunk to that; 0: never."""

    most_tiles: int = 0

    def num_rows(self, side: int, canvas: TiledCanvas) -> int:
        """Visual tokens of an image, newlines included; side: a tile's tokens per side."""
        if not canvas.rows:
            return side * side + 1
        high, wide = self.shrunk(side, *self.kept(side, canvas))
        return side * side + high * wide + high

    def kept(self, side: int, canvas: TiledCanvas) -> tuple[int, int]:
        """(rows, columns) of tokens without the margins. Float expressions in the order of transformers'
        `unpad_image`."""
        high, wide = side * canvas.rows, side * canvas.cols
        width, height = canvas.image_width, canvas.image_height
        if width / height > wide / high:
            inner = int(round(height * (wide / width), 7))
            return high - (high - inner) // 2 * 2, wide
        inner = int(round(width * (high / height), 7))
        return high, wide - (wide - inner) // 2 * 2

    def shrunk(self, side: int, high: int, wide: int) -> tuple[int, int]:
        """(rows, columns) that are left of so many. As in transformers' LLaVA-OneVision."""
        if self.most_tiles:
            ratio = math.sqrt(high * wide / (self.most_tiles * side**2))
            if ratio > 1.1:
                return int(high // ratio), int(wide // ratio)
        return high, wide


def pack(rows: Tensor, newline: Tensor, packing: Packing, side: int, canvas: TiledCanvas) -> Tensor:
    """[tiles * side^2, width] of tiles in reading order, the whole image last, to [num_rows, width]."""
    import torch

    width = rows.shape[1]
    if not canvas.rows:
        return torch.cat((rows, newline[None]))
    whole = rows[-side * side :]
    cells = rows[: -side * side].view(canvas.rows, canvas.cols, side, side, width).transpose(1, 2)
    cells = cells.reshape(canvas.rows * side, canvas.cols * side, width)
    high, wide = packing.kept(side, canvas)
    top, left = (cells.shape[0] - high) // 2, (cells.shape[1] - wide) // 2
    cells = cells[top : top + high, left : left + wide]
    size = packing.shrunk(side, high, wide)
    if size != (high, wide):
        planes = cells.permute(2, 0, 1)[None].float()
        cells = torch.nn.functional.interpolate(planes, size, mode="bilinear")[0].permute(1, 2, 0)
    lines = torch.cat((cells.to(rows.dtype), newline.expand(len(cells), 1, width)), 1)
    return torch.cat((whole, lines.flatten(0, 1)))
