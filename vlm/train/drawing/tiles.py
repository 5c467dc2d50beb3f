"""Images cut as Idefics3's rule cuts them, with what every patch shows as training targets."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlm.train.drawing.layout import Glyph
from vlm.train.drawing.shapes import COLOURS, SHAPES, Spot

TILE = 128
PATCH = 16
PATCHES = TILE // PATCH  # a side
LONGEST_EDGE = 256
SLOTS = 2  # characters a patch may hold
CHARACTERS = "".join(chr(code) for code in range(33, 127))
NUM_CLASSES = 1 + len(CHARACTERS) + len(SHAPES) + len(COLOURS)  # class 0: nothing
IGNORE = -100
LEGIBLE = (13.0, 36.0)  # font sizes in px of the tile that get a character loss
BORDER = 0.4  # px: a centre nearer to a patch border leaves both patches without a loss
CLASS_OF = {name: index for index, name in enumerate([*CHARACTERS, *SHAPES, *COLOURS], 1)}


@dataclass(frozen=True)
class Cut:
    """Tiles in reading order, then the thumbnail: uint8 [num_tiles, 128, 128, 3]; the grid they came from."""

    tiles: np.ndarray
    rows: int
    cols: int


def resized_size(width: int, height: int) -> tuple[int, int]:
    """(width, height) before cutting: longest edge 256, both edges rounded up to whole tiles."""
    if width >= height:
        edge = int(LONGEST_EDGE * height / width)
        width, height = LONGEST_EDGE, max(edge + edge % 2, 1)
    else:
        edge = int(LONGEST_EDGE * width / height)
        width, height = max(edge + edge % 2, 1), LONGEST_EDGE
    return math.ceil(width / TILE) * TILE, math.ceil(height / TILE) * TILE


def cut(image: Image.Image, resample: Image.Resampling = Image.Resampling.LANCZOS) -> Cut:
    """Resizes and cuts an RGB image; the thumbnail is always last."""
    width, height = resized_size(*image.size)
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    rows, cols = height // TILE, width // TILE
    pixels = np.asarray(image)
    grid = pixels.reshape(rows, TILE, cols, TILE, 3).swapaxes(1, 2).reshape(rows * cols, TILE, TILE, 3)
    thumbnail = np.asarray(image.resize((TILE, TILE), resample))
    return Cut(np.concatenate([grid, thumbnail[None]]), rows, cols)


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
                targets[row, col, slot] = CLASS_OF[char]


def _mark_shapes(targets: np.ndarray, spots: list[tuple[Spot, float, float, float]]) -> None:
    """Writes (form, colour) into the patches of targets [8, 8, 2] whose centre a shape's circle holds."""
    centres = (np.arange(PATCHES) + 0.5) * PATCH
    for spot, x, y, radius in spots:
        inside = (centres[None, :] - x) ** 2 + (centres[:, None] - y) ** 2 < radius**2
        targets[inside] = CLASS_OF[spot.shape.name], CLASS_OF[spot.shape.colour]


def _legible(sizes: list[float]) -> bool:
    return LEGIBLE[0] <= min(sizes, default=LEGIBLE[0]) and max(sizes, default=LEGIBLE[1]) <= LEGIBLE[1]


def patch_targets(glyphs: tuple[Glyph, ...], spots: tuple[Spot, ...], rows: int, cols: int) -> np.ndarray:
    """Classes int64 [num_tiles, 64, 2] of CLASS_OF: two characters, or a shape's form and colour.

    IGNORE fills tiles whose text is not of a legible size.
    """
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
