"""Towers whose matrix products are of bfloat16 numbers, while what adds up over the layers stays float32.

A CPU with AVX512-BF16 or AMX multiplies these two to six times as fast. Norms, residuals and softmax are
float32; each product's sum is too (Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HalfLinear(nn.Module):
    """bfloat16 [..., out] of any [..., in]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().to(torch.bfloat16), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias)


def multiply_in_bfloat16(network: nn.Module) -> None:
    """Every linear of a float32 network becomes a HalfLinear, in place."""
    for name, child in network.named_children():
        if isinstance(child, nn.Linear):
            setattr(network, name, HalfLinear(child))
        else:
            multiply_in_bfloat16(child)
