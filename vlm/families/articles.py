"""The articles' own configuration: an open_clip tower beside any GQA decoder. Not a family on a hub."""

from __future__ import annotations

from dataclasses import dataclass

from preprocess.types import TileGrid
from vlm.prompt import TileRun


@dataclass(frozen=True)
class PlainFormat:
    """Only the visual tokens, tile after tile, for decoders without image markers (the articles' form)."""

    image_token_id: int
    tokens_per_tile: int

    def run(self, grid: TileGrid) -> TileRun:
        length = grid.num_tiles * self.tokens_per_tile
        return TileRun((self.image_token_id,) * length, ((0, length, 0),))
