"""Images cut as the service cuts them, with what every patch shows as training targets."""

import numpy as np
from PIL import Image

from preprocess import cut as product_cut
from preprocess.tiling import Idefics3Tiling
from preprocess.types import TileGrid, Tiles
from vlm.train.drawing.layout import Glyph
from vlm.train.drawing.shapes import COLOURS, SHAPES, Spot

TILE = 128
PATCH = 16
PATCHES = TILE // PATCH  # a side
LONGEST_EDGE = 256
RULE = Idefics3Tiling(TILE, LONGEST_EDGE)
SLOTS = 2  # characters a patch may hold
CHARACTERS = "".join(chr(code) for code in range(33, 127))
NUM_CLASSES = 1 + len(CHARACTERS) + len(SHAPES) + len(COLOURS)  # class 0: nothing
IGNORE = -100
LEGIBLE = (11.0, 36.0)  # font sizes in px of the tile that get a character loss
BORDER = 0.4  # px: a centre nearer to a patch border leaves both patches without a loss
CLASS_OF = {name: index for index, name in enumerate([*CHARACTERS, *SHAPES, *COLOURS], 1)}


def cut(image: Image.Image) -> Tiles:
    """An RGB image as the service cuts it; the thumbnail is always last."""
    return product_cut.cut(image, RULE.plan(*image.size), Image.Resampling.LANCZOS, "exact")


def _mark(targets: np.ndarray, glyphs: list[tuple[str, float, float]]) -> None:
    """Writes up to two characters a patch, from left to right, into targets [8, 8, 2]."""
    held: dict[tuple[int, int], list[str]] = {}
    for char, x, y in sorted(glyphs, key=lambda glyph: glyph[1]):
        col, row = int(x // PATCH), int(y // PATCH)
        if not (0 <= col < PATCHES and 0 <= row < PATCHES):
            continue
        held.setdefault((row, col), []).append(char)
        unsure = set()
        for dx, dy in ((-BORDER, 0), (BORDER, 0), (0, -BORDER), (0, BORDER)):
            unsure.add((int((y + dy) // PATCH), int((x + dx) // PATCH)))
        if len(unsure) > 1:
            for near_row, near_col in unsure:
                if 0 <= near_col < PATCHES and 0 <= near_row < PATCHES:
                    targets[near_row, near_col] = IGNORE
    for (row, col), chars in held.items():
        if len(chars) > SLOTS or targets[row, col, 0] == IGNORE:
            targets[row, col] = IGNORE
        else:
            for slot, char in enumerate(chars):
                targets[row, col, slot] = CLASS_OF.get(char, IGNORE)


def _mark_shapes(targets: np.ndarray, spots: list[tuple[Spot, float, float, float]]) -> None:
    """Writes (form, colour) into the patches of targets [8, 8, 2] whose centre a shape's circle holds."""
    centres = (np.arange(PATCHES) + 0.5) * PATCH
    for spot, x, y, radius in spots:
        inside = (centres[None, :] - x) ** 2 + (centres[:, None] - y) ** 2 < radius**2
        targets[inside] = CLASS_OF[spot.shape.name], CLASS_OF[spot.shape.colour]


def _legible(sizes: list[float]) -> bool:
    return LEGIBLE[0] <= min(sizes, default=LEGIBLE[0]) and max(sizes, default=LEGIBLE[1]) <= LEGIBLE[1]


def patch_targets(glyphs: tuple[Glyph, ...], spots: tuple[Spot, ...], grid: TileGrid) -> np.ndarray:
    """Classes int64 [num_tiles, 64, 2] of CLASS_OF: two characters, or a shape's form and colour.

    IGNORE fills tiles whose text is not of a legible size.
    """
    rows, cols = grid.rows, grid.cols
    targets = np.zeros((rows * cols + 1, PATCHES, PATCHES, SLOTS), dtype=np.int64)
    for index in range(rows * cols + 1):
        thumbnail = index == rows * cols
        across, down = (1 / cols, 1 / rows) if thumbnail else (1.0, 1.0)
        left, top = (0, 0) if thumbnail else ((index % cols) * TILE, (index // cols) * TILE)
        if not _legible([glyph.size * down for glyph in glyphs]) or (glyphs and across != down):
            targets[index] = IGNORE
            continue
        _mark(
            targets[index], [(glyph.char, glyph.x * across - left, glyph.y * down - top) for glyph in glyphs]
        )
        _mark_shapes(
            targets[index],
            [(spot, spot.x * across - left, spot.y * down - top, spot.radius * down) for spot in spots],
        )
    return targets.reshape(-1, PATCHES * PATCHES, SLOTS)
