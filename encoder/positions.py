"""Where patches are: rotations by row and column, stretched tables, windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.encoder_config import TowerConfig


def patch_rotations(config: TowerConfig, rows: int, cols: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines float32 [rows * cols, head_dim] of a grid's patches in reading order:
    rotated = x * cos + roll(x, head_dim / 2) * sin.

    References: transformers' PixtralVisionRotaryEmbedding and Qwen2_5_VLVisionRotaryEmbedding.
    """
    half = config.width // config.num_heads // 2
    theta = torch.tensor(config.rope_theta)
    if config.rope == "axial":
        by_row = by_col = theta ** -(torch.arange(0, half, 2, dtype=torch.float32) / half)
    else:
        inverse = theta ** -(torch.arange(half, dtype=torch.float32) / half)
        by_row, by_col = inverse[0::2], inverse[1::2]
    row, col = torch.arange(rows)[:, None, None], torch.arange(cols)[None, :, None]
    shape = (rows, cols, half // 2)
    angles = torch.cat(((row * by_row).expand(shape), (col * by_col).expand(shape)), -1).flatten(0, 1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def stretched(table: Tensor, config: TowerConfig, rows: int, cols: int) -> Tensor:
    """A table [1, side * side, width] of positions over a grid: [1, rows * cols, width], between its own
    values linearly. References: transformers' Qwen3-VL (corners) and PaddleOCR-VL (centres)."""
    side = config.table_side
    square = table.float().transpose(1, 2).unflatten(2, (side, side))
    grid = F.interpolate(square, (rows, cols), mode="bilinear", align_corners=config.table == "corners")
    return grid.flatten(2).transpose(1, 2).to(table.dtype)


@dataclass(frozen=True, slots=True)
class Windows:
    """A grid's patches window by window: equal windows in a row, so that each kind is one batch."""

    order: Tensor  # int64 [patches]: which patch, in reading order, is at each place
    places: Tensor  # int64 [patches]: where each patch is
    groups: tuple[tuple[int, int], ...]  # (windows, patches of each)


def windows_of(height: int, width: int, window: int, device: torch.device) -> Windows:
    """Windows of `window` x `window` patches from the top left corner, smaller ones at the other edges.
    Height and width are in patches.

    Reference: `get_vision_window_index` of transformers.
    """
    patches = torch.arange(height * width).view(height, width)
    whole_height, whole_width = height - height % window, width - width % window
    bands = [(0, whole_height, window), (whole_height, height, height % window)]
    columns = [(0, whole_width, window), (whole_width, width, width % window)]
    order, groups = [], []
    for top, bottom, high in bands:
        for left, right, wide in columns:
            if top < bottom and left < right:
                cut = patches[top:bottom, left:right].unflatten(0, (-1, high)).unflatten(2, (-1, wide))
                order.append(cut.transpose(1, 2).flatten())
                groups.append(((bottom - top) // high * ((right - left) // wide), high * wide))
    joined = torch.cat(order)
    return Windows(joined.to(device), joined.argsort().to(device), tuple(groups))
