"""Connectors: patch features [n, rows, cols, width] to visual tokens [n, tokens, d_model]."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.encoder_config import ConnectorConfig, ConnectorKind, EncoderConfig, TowerConfig
from encoder.tower import activate, build_norm


def pixel_shuffle(x: Tensor, reduction: int) -> Tensor:
    """Joins reduction x reduction neighbours into one wider token, row by row within the cell; drops those
    that fill none.

    [n, rows, cols, width] to [n, rows / reduction * cols / reduction, reduction^2 * width]. Reference: the
    order of Idefics3Connector.pixel_shuffle.
    """
    n, rows, cols, width = x.shape
    x = x[:, : rows - rows % reduction, : cols - cols % reduction]
    x = x.reshape(n, rows // reduction, reduction, cols // reduction, reduction * width).transpose(2, 3)
    return x.reshape(n, -1, reduction * reduction * width)


class PixelShuffle(nn.Module):
    """SmolVLM and Idefics3: joined patches, one projection without bias."""

    def __init__(self, config: ConnectorConfig, width: int) -> None:
        super().__init__()
        self.reduction = config.reduction
        self.proj = nn.Linear(width * config.reduction**2, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(pixel_shuffle(x, self.reduction))


class AveragePool(nn.Module):
    """The mean of each cell's patches, perhaps a norm, then one projection.

    Odd grids pool with ceil, 27x27 at 2x2 to 14x14; a border cell's mean counts only the patches that exist.
    """

    def __init__(self, config: ConnectorConfig, width: int) -> None:
        super().__init__()
        self.reduction = config.reduction
        self.norm = build_norm(config.norm, width, config.norm_eps)
        self.proj = nn.Linear(width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.permute(0, 3, 1, 2).contiguous()
        pooled = F.avg_pool2d(grid, self.reduction, ceil_mode=True, count_include_pad=False)
        return self.proj(self.norm(pooled.flatten(2).transpose(1, 2)))


class MlpConnector(nn.Module):
    """Joined patches (none at reduction 1, as in LLaVA), two layers with an activation between.

    A norm, where set, is over the joined patches or over each before. A linear may come in front of the two
    that takes joined patches to one's width (Mistral 3).
    """

    def __init__(self, config: ConnectorConfig, width: int) -> None:
        super().__init__()
        joined = width * config.reduction**2
        self.reduction, self.norm_patches = config.reduction, config.norm_patches
        self.activation = config.activation
        self.norm = build_norm(config.norm, width if config.norm_patches else joined, config.norm_eps)
        self.merge = nn.Linear(joined, width, bias=False) if config.merged else nn.Identity()
        self.fc1 = nn.Linear(width if config.merged else joined, config.intermediate, bias=config.bias)
        self.fc2 = nn.Linear(config.intermediate, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_patches:
            x = pixel_shuffle(self.norm(x), self.reduction)
        else:
            x = self.norm(pixel_shuffle(x, self.reduction))
        return self.fc2(activate(self.fc1(self.merge(x)), self.activation))


class GatedMlpConnector(nn.Module):
    """Joined patches to the decoder's width, a norm with GELU, then a gated MLP (GLM's merger)."""

    def __init__(self, config: ConnectorConfig, width: int) -> None:
        super().__init__()
        self.reduction, self.activation = config.reduction, config.activation
        self.merge = nn.Linear(width * config.reduction**2, config.d_model)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.fc1 = nn.Linear(config.d_model, 2 * config.intermediate, bias=False)  # the gate's rows first
        self.fc2 = nn.Linear(config.intermediate, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.merge(pixel_shuffle(x, self.reduction)))
        gate, up = self.fc1(F.gelu(self.norm(x))).chunk(2, -1)
        return self.fc2(activate(gate, self.activation) * up)


class Deepstack(nn.Module):
    """A connector of the tower's output and one of each further layer's: their rows side by side.

    The further ones norm the joined patches (Qwen3-VL).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        further = replace(config.connector, norm_patches=False)
        self.main = build_connector(config.connector, config.tower)
        self.further = nn.ModuleList(build_connector(further, config.tower) for _ in config.deepstack)

    def forward(self, x: Tensor, *layers: Tensor) -> Tensor:
        rows = [connector(y) for connector, y in zip(self.further, layers, strict=True)]
        return torch.cat((self.main(x), *rows), -1)


class WithNewline(nn.Module):
    """A connector, and the token behind each row of an image that `encoder.packing` packs."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.main = build_connector(config.connector, config.tower)
        self.newline = nn.Parameter(torch.empty(config.connector.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


CONNECTORS: dict[ConnectorKind, type[nn.Module]] = {
    "pixel_shuffle": PixelShuffle,
    "average_pool": AveragePool,
    "mlp": MlpConnector,
    "gated_mlp": GatedMlpConnector,
}


def build_connector(config: ConnectorConfig, tower: TowerConfig) -> nn.Module:
    return CONNECTORS[config.kind](config, tower.out_width)
