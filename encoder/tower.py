"""The vision tower, laid out and named as timm builds SigLIP's for open_clip; other towers by their options.

Reference: timm.models.vision_transformer.VisionTransformer with `class_token=False`, up to and including
its final norm (`forward_features`); the attention pooling behind it is not part of a VLM's tower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.encoder_config import Activation, NormKind, TowerConfig

TANH_GELU_SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)
TANH_GELU_CUBIC = 0.044715
QK_NORM_EPS = 1e-6


def gelu(x: Tensor, kind: Activation) -> Tensor:
    """GELU, exact or in its tanh form.

    The tanh form is x * sigmoid(2u) for 0.5 * x * (1 + tanh(u)): the same function within float32 rounding,
    and on CPU 1.5 to 2 times as fast as torch's own kernel.
    """
    if kind == "gelu":
        return F.gelu(x)
    if x.device.type != "cpu" or torch.is_grad_enabled() or x.dtype != torch.float32:
        return F.gelu(x, approximate="tanh")
    gate = (x * x).mul_(TANH_GELU_CUBIC).add_(1.0).mul_(x).mul_(TANH_GELU_SLOPE)
    return gate.sigmoid_().mul_(x)


class PatchEmbed(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)  # [n, patches, width], in reading order


def build_norm(kind: NormKind | None, width: int, eps: float) -> nn.Module:
    if kind is None:
        return nn.Identity()
    return nn.LayerNorm(width, eps) if kind == "layer" else nn.RMSNorm(width, eps)


class Attention(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.width, eps=QK_NORM_EPS)
            self.k_norm = nn.RMSNorm(config.width, eps=QK_NORM_EPS)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        n, patches, width = x.shape
        qkv = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.chunk(3, dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(n, patches, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [n, heads, patches, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(n, patches, width))


class Mlp(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.fc1 = nn.Linear(config.width, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x), self.activation))


class Block(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm1 = build_norm(config.norm, config.width, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = build_norm(config.norm, config.width, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Normalised pixels [n, 3, S, S] to patch features [n, patches, width]."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width)) if config.class_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, config.num_positions, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config.final_norm, config.width, config.norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if self.cls_token is None else x[:, 1:]
