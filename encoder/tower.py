"""The vision tower, laid out and named as timm builds SigLIP's for open_clip; other towers by their options.

Reference: timm.models.vision_transformer.VisionTransformer with `class_token=False`, up to and including
its final norm (`forward_features`); the attention pooling behind it is not part of a VLM's tower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.encoder_config import Activation, NormKind, TowerConfig
from encoder.positions import Windows, patch_rotations, stretched, windows_of

TANH_GELU_SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)
TANH_GELU_CUBIC = 0.044715
QUICK_GELU_SLOPE = 1.702
QK_NORM_EPS = 1e-6
SCORE_BYTES = 1 << 30  # of attention scores in float32 at once


def activate(x: Tensor, kind: Activation) -> Tensor:
    """GELU exact, in its tanh form, or as x * sigmoid(1.702 x); SiLU.

    The tanh form is x * sigmoid(2u) for 0.5 * x * (1 + tanh(u)): the same function within float32 rounding,
    and on CPU 1.5 to 2 times as fast as torch's own kernel.
    """
    if kind == "silu":
        return F.silu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(QUICK_GELU_SLOPE * x)
    if kind == "gelu":
        return F.gelu(x)
    if x.device.type != "cpu" or torch.is_grad_enabled() or x.dtype != torch.float32:
        return F.gelu(x, approximate="tanh")
    gate = (x * x).mul_(TANH_GELU_CUBIC).add_(1.0).mul_(x).mul_(TANH_GELU_SLOPE)
    return gate.sigmoid_().mul_(x)


class PatchEmbed(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, config.patch_size, bias=config.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, 3, H, W] to [n, rows, cols, width]."""
        return self.proj(pixels).permute(0, 2, 3, 1)


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
        self.head_norms: nn.ModuleList | None = None
        if config.head_norm:
            head = config.width // config.num_heads
            self.head_norms = nn.ModuleList(nn.RMSNorm(head, config.norm_eps) for _ in "qk")
        self.proj = nn.Linear(config.width, config.width, bias=config.linear_bias)

    def forward(
        self, x: Tensor, rotations: tuple[Tensor, Tensor] | None, windows: Windows | None = None
    ) -> Tensor:
        n, patches, width = x.shape
        qkv = self.qkv(x)
        products = qkv.dtype  # bfloat16 between two products of a float32 tower: see encoder.forward.mixed
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.to(x.dtype).chunk(3, dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1).to(products)
        qkv = qkv.view(n, patches, 3, self.num_heads, width // self.num_heads)
        qk, v = qkv[:, :, :2], qkv[:, :, 2].transpose(1, 2)
        if self.head_norms is not None:
            normed = [norm(qk[:, :, i].to(x.dtype)) for i, norm in enumerate(self.head_norms)]
            qk = torch.stack(normed, 2).to(products)
        if rotations is not None:
            cos, sin = (table[:, None, None] for table in rotations)
            qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin).to(products)
        q, k = qk.permute(2, 0, 3, 1, 4)  # each [n, heads, patches, head_dim]
        mixed = attend(q, k, v) if windows is None else attend_windows(q, k, v, windows)
        return self.proj(mixed.transpose(1, 2).reshape(n, patches, width))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All to all, [n, heads, patches, head_dim]. Queries go in blocks where scores could fill the memory: a
    device without a fused kernel for them writes them out, 9 GB for 12,000 patches of 16 heads."""
    n, heads, patches, _ = q.shape
    block = max(1, SCORE_BYTES // (n * heads * patches * 4))
    if block >= patches:
        return F.scaled_dot_product_attention(q, k, v)
    parts = [F.scaled_dot_product_attention(part, k, v) for part in q.split(block, 2)]
    return torch.cat(parts, 2)


def attend_windows(q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
    """As `attend`, of patches in the order of `windows`, each to those of its own window."""
    parts, start = [], 0
    for count, size in windows.groups:
        some = slice(start, start + count * size)
        each = [t[:, :, some].unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*each)
        parts.append(mixed.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3))
        start = some.stop
    return torch.cat(parts, 2)


class Mlp(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.activation, self.gated = config.activation, config.gated
        hidden = config.intermediate * (1 + config.gated)
        self.fc1 = nn.Linear(config.width, hidden, bias=config.linear_bias)  # gated: the gate's rows first
        self.fc2 = nn.Linear(config.intermediate, config.width, bias=config.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.gated:
            gate, up = x.chunk(2, -1)
            return self.fc2(activate(gate, self.activation) * up)
        return self.fc2(activate(x, self.activation))


class Block(nn.Module):
    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm1 = build_norm(config.norm, config.width, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = build_norm(config.norm, config.width, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self, x: Tensor, rotations: tuple[Tensor, Tensor] | None, windows: Windows | None = None
    ) -> Tensor:
        x = x + self.attn(self.norm1(x), rotations, windows)
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Normalised pixels [n, 3, H, W] to patch features [n, rows, cols, width]."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width)) if config.class_token else None
        self.pos_embed = None
        if config.table != "none":
            self.pos_embed = nn.Parameter(torch.empty(1, config.num_positions, config.width))
        self.first_norm = build_norm(config.first_norm, config.width, config.norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config.final_norm, config.width, config.norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.features(pixels)[0]

    def features(self, pixels: Tensor, layers: tuple[int, ...] = ()) -> list[Tensor]:
        """The tower's output, and what comes out of each of `layers`, each [n, rows, cols, width]."""
        c = self.config
        x = self.patch_embed(pixels)
        n, rows, cols, _ = x.shape
        x = x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        if self.pos_embed is not None:
            x = x + (stretched(self.pos_embed, c, rows, cols) if c.table_side else self.pos_embed)
        rotations = patch_rotations(c, rows, cols, x.device) if c.rope != "none" else None
        windows = windows_of(rows, cols, c.window, x.device) if c.window else None
        if windows is not None:
            x = x[:, windows.order]
            if rotations is not None:
                rotations = rotations[0][windows.order], rotations[1][windows.order]
        x = self.first_norm(x)
        taken = {}
        for index, block in enumerate(self.blocks):
            x = block(x, rotations, None if index in c.full_layers else windows)
            if index in layers or index in c.joined_layers:
                taken[index] = x

        def in_place(x: Tensor) -> Tensor:
            x = x if self.cls_token is None else x[:, 1:]
            x = x if windows is None else x[:, windows.places]
            return x.reshape(n, rows, cols, -1)

        joined = [taken[layer] for layer in c.joined_layers]
        x = torch.cat(joined, -1) if joined else self.norm(x)
        return [in_place(x), *(in_place(taken[layer]) for layer in layers)]
