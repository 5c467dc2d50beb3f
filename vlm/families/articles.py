"""The articles' own configuration: an open_clip tower beside any GQA decoder. Not a family on a hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from preprocess.types import TileGrid
from vlm.prompt import Piece, Rows


@dataclass(frozen=True)
class PlainFormat:
    """Only the visual tokens, tile after tile, for decoders without image markers."""

    row_id: int
    tokens_per_tile: int
    placeholder: str = "<image>"

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        return (Rows(grid.num_tiles * self.tokens_per_tile, 0),)
