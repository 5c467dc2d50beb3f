"""From an upright RGB image and a plan to uint8 tiles."""

from __future__ import annotations

import numpy as np
from PIL import Image

from preprocess.types import ResizePlan, Tiles, Variant

# how much larger than its target a fast resize's input stays, per side, before the filter proper runs
_REDUCING_GAP = 2.0


def cut(image: Image.Image, plan: ResizePlan, resample: int, variant: Variant) -> Tiles:
    """Takes every step of the plan; `fast` shrinks a much larger image coarsely before the first.

    resample: Pillow's number of the filter.
    """
    grid = plan.grid
    if plan.boxes:
        return _cut_boxes(image, plan, resample, variant)
    filter_ = Image.Resampling(resample)
    gap = None if variant == "exact" else _REDUCING_GAP
    canvas = image
    if plan.square is not None:
        side = max(image.size)
        canvas = _amid(image, (side, side), plan.square)
    for size in plan.steps:
        canvas = canvas.resize(size, filter_, reducing_gap=gap)
    if plan.canvas is not None:
        canvas = _amid(canvas, plan.canvas, (0, 0, 0))
    height, width = grid.tile_height, grid.tile_width
    pixels = np.empty((grid.num_tiles, height, width, 3), dtype=np.uint8)
    num_cut = grid.rows * grid.cols
    if num_cut == 0:
        pixels[0] = np.asarray(canvas)
        return Tiles(pixels, grid)
    cells = np.asarray(canvas).reshape(grid.rows, height, grid.cols, width, 3)
    pixels[:num_cut].reshape(grid.rows, grid.cols, height, width, 3)[:] = cells.transpose(0, 2, 1, 3, 4)
    if grid.thumbnail:
        source = canvas if plan.thumbnail_of_canvas else image
        pixels[-1] = np.asarray(source.resize((width, height), filter_, reducing_gap=gap))
    return Tiles(pixels, grid)


def _amid(image: Image.Image, size: tuple[int, int], colour: tuple[int, int, int]) -> Image.Image:
    """In the middle of a canvas; where the margins differ by a pixel, the right and lower ones are wider."""
    canvas = Image.new("RGB", size, colour)
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    return canvas


def _cut_boxes(image: Image.Image, plan: ResizePlan, resample: int, variant: Variant) -> Tiles:
    """Pieces of the image itself, each squashed to a tile, and the whole image last."""
    grid, filter_ = plan.grid, Image.Resampling(resample)
    gap = None if variant == "exact" else _REDUCING_GAP
    size = (grid.tile_width, grid.tile_height)
    pixels = np.empty((grid.num_tiles, grid.tile_height, grid.tile_width, 3), dtype=np.uint8)
    for index, box in enumerate([*plan.boxes, (0, 0, *image.size)]):
        pixels[index] = np.asarray(image.crop(box).resize(size, filter_, reducing_gap=gap))
    return Tiles(pixels, grid)
