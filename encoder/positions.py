"""Where patches are: rotations by row and column."""

from __future__ import annotations

import torch
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
