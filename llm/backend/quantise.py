"""Weights in 8 and 4 bits and keys and values in 8: plain torch, and what the kernels' numbers mean.

Everything is symmetric: a stored integer times its scale. Rounding is to the nearest, halves to even.
Reference for the signed 4-bit range: llama.cpp's Q4_0; the scale here is searched for instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm.storage import INT4_GROUP

_ROWS = 1024  # of a weight quantised at a time: bounds the memory that the search takes
# Multiples of the scale that just holds a group's largest value. Clipping it a little often errs less.
_CANDIDATES = (1.0, 0.93, 0.86, 0.8)


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] -> int8 [n, k] and float32 scales [n], one an output."""
    weight = weight.to(torch.float32)
    scale = weight.abs().amax(1) / 127
    return _rounded(weight, scale[:, None], -127, 127).to(torch.int8), scale


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] -> int8 [n, groups, 32] of -8..7 and scales [n, groups] that bfloat16 holds exactly.

    A short last group is filled with zeros. Each scale is the one of least squared error among a few; its
    sign is free, so that the largest value of a group may take the -8 that has no positive twin.
    """
    parts = [_quantise_rows(rows) for rows in weight.to(torch.float32).split(_ROWS)]
    return torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts])


def _quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % INT4_GROUP)).unflatten(
        1, (-1, INT4_GROUP)
    )
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    best_scale = torch.zeros_like(largest)
    best_error = torch.full_like(largest, torch.inf)
    for factor in _CANDIDATES:
        scale = largest * (factor / -8)
        values = _rounded(groups, scale[..., None], -8, 7)
        # The least-squares scale for these integers.
        scale = (values * groups).sum(2) / values.square().sum(2).clamp_min(1e-30)
        scale = scale.to(torch.bfloat16).to(torch.float32)
        error = (_rounded(groups, scale[..., None], -8, 7) * scale[..., None] - groups).square().sum(2)
        better = error < best_error
        best_scale, best_error = (
            torch.where(better, scale, best_scale),
            torch.where(better, error, best_error),
        )
    return _rounded(groups, best_scale[..., None], -8, 7).to(torch.int8), best_scale


def _rounded(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return torch.where(scale == 0, 0, x / scale).round().clamp(low, high)
