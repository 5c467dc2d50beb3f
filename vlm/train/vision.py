"""Tower and connector for training, with Hugging Face's parameter names.

The service's own tower (`encoder.model`) has no gradients, and folds what a forward needs at load. The tests
hold both to the same answers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.train.drawing.geometry import Shape
from vlm.train.drawing.tiles import PATCH, PATCHES


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (T, P, D)
        tiles, patches, width = x.shape
        q, k, v = (
            proj(x).view(tiles, patches, self.heads, width // self.heads).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        with torch.autocast("cpu", enabled=False):  # in bfloat16 its backward pass is three times as slow
            mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        return self.out_proj(mixed.transpose(1, 2).reshape(tiles, patches, width))


class VisionMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.vision_width, eps=1e-6)
        self.self_attn = VisionAttention(shape.vision_width, shape.vision_heads)
        self.layer_norm2 = nn.LayerNorm(shape.vision_width, eps=1e-6)
        self.mlp = VisionMlp(shape.vision_width, shape.vision_mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, width, PATCH, PATCH)
        self.position_embedding = nn.Embedding(PATCHES * PATCHES, width)

    def forward(self, patches: Tensor) -> Tensor:  # (T, 64, 3 * 16 * 16)
        embedded = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return embedded + self.position_embedding.weight


class VisionEncoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(shape) for _ in range(shape.vision_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class VisionModel(nn.Module):
    """uint8 tiles (T, 128, 128, 3) to patch features (T, 64, D)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(shape.vision_width)
        self.encoder = VisionEncoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.vision_width, eps=1e-6)

    def forward(self, tiles: Tensor) -> Tensor:
        pixels = tiles.float().mul_(1 / 127.5).sub_(1.0)
        count = pixels.shape[0]
        patches = pixels.view(count, PATCHES, PATCH, PATCHES, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
        x = self.embeddings(patches.reshape(count, PATCHES * PATCHES, -1))
        normed: Tensor = self.post_layernorm(self.encoder(x))
        return normed


class Projection(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inner, width, bias=False)


class Connector(nn.Module):
    """Folds `fold` x `fold` patches into one visual token: (T, 64, D) to (T, 16, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fold = shape.fold
        self.modality_projection = Projection(shape.vision_width * shape.fold**2, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        tiles, _, width = x.shape
        side = PATCHES // self.fold
        x = x.view(tiles, side, self.fold, side, self.fold, width).permute(0, 1, 3, 2, 4, 5)
        folded: Tensor = self.modality_projection.proj(x.reshape(tiles, side * side, -1))
        return folded
