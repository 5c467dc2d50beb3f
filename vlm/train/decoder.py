"""Decoder for training, with Hugging Face's parameter names.

Sequences of different lengths are laid end to end (no padding); attention runs sequence by sequence.
The service's decoder (`llm.backend`) has no gradients, works on a paged cache, and fuses its weights at load.
The tests hold both to the same answers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.train.drawing.geometry import Shape


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a flat batch lie: rotary tables (N, head_dim), lengths, masks (L, L) each."""

    cos: Tensor
    sin: Tensor
    lengths: list[int]
    masks: list[Tensor]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (N, H, head_dim) with tables (N, 1, head_dim)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class TextAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:  # (N, D)
        q = rotate(self.q_proj(x).view(-1, self.heads, self.head_dim), layout.cos, layout.sin)
        k = rotate(self.k_proj(x).view(-1, self.kv_heads, self.head_dim), layout.cos, layout.sin)
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        flat = (part.float().transpose(0, 1)[None] for part in (q, k, v))
        queries, keys, values = (part.split(layout.lengths, 2) for part in flat)
        with torch.autocast("cpu", enabled=False):
            mixed = [
                F.scaled_dot_product_attention(query, key, value, mask)
                for query, key, value, mask in zip(queries, keys, values, layout.masks, strict=True)
            ]
        projected: Tensor = self.o_proj(torch.cat(mixed, 2)[0].transpose(0, 1).flatten(1))
        return projected


class TextMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.width)
        self.self_attn = TextAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.width)
        self.mlp = TextMlp(shape)

    def attend(self, x: Tensor, layout: Layout) -> Tensor:
        """Attention's addition to x (N, D)."""
        added: Tensor = self.self_attn(self.input_layernorm(x), layout)
        return added

    def feed(self, x: Tensor) -> Tensor:
        """The MLP's addition to x."""
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return added

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + self.attend(x, layout)
        return x + self.feed(x)


class TextModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(TextLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)


def segment_mask(segments: Tensor) -> Tensor:
    """Additive mask (L, L): a token sees the prompt (segment 0) and its own segment, up to itself."""
    length = segments.shape[0]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = causal & ((segments[None, :] == 0) | (segments[None, :] == segments[:, None]))
    return torch.zeros(length, length).masked_fill_(~seen, float("-inf"))
