"""Images cut as Idefics3's rule cuts them, with the characters of every patch as training targets."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlm.train.layout import Glyph

TILE = 128
PATCH = 16
PATCHES = TILE // PATCH  # a side
LONGEST_EDGE = 256
SLOTS = 2  # characters a patch may hold
CHARACTERS = "".join(chr(code) for code in range(33, 127))
NUM_CLASSES = 1 + len(CHARACTERS)  # class 0: no character
IGNORE = -100
LEGIBLE = (13.0, 36.0)  # font sizes in px of the tile that get a character loss
BORDER = 0.4  # px: a centre nearer to a patch border leaves both patches without a loss
CLASS_OF = {char: index for index, char in enumerate(CHARACTERS, 1)}


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


def patch_targets(glyphs: tuple[Glyph, ...], rows: int, cols: int) -> np.ndarray:
    """Character classes int64 [num_tiles, 64, 2]; IGNORE in tiles whose text is not of a legible size."""
    targets = np.zeros((rows * cols + 1, PATCHES, PATCHES, SLOTS), dtype=np.int64)
    sizes = [glyph.size for glyph in glyphs]
    if not glyphs:
        return targets.reshape(-1, PATCHES * PATCHES, SLOTS)
    for index in range(rows * cols):
        left, top = (index % cols) * TILE, (index // cols) * TILE
        if LEGIBLE[0] <= min(sizes) and max(sizes) <= LEGIBLE[1]:
            _mark(targets[index], [(glyph.char, glyph.x - left, glyph.y - top) for glyph in glyphs])
        else:
            targets[index] = IGNORE
    across, down = 1 / cols, 1 / rows
    if rows == cols and LEGIBLE[0] <= min(sizes) * down and max(sizes) * down <= LEGIBLE[1]:
        _mark(targets[-1], [(glyph.char, glyph.x * across, glyph.y * down) for glyph in glyphs])
    else:
        targets[-1] = IGNORE
    return targets.reshape(-1, PATCHES * PATCHES, SLOTS)
