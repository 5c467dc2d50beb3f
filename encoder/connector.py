"""Connectors: patch features [n, side * side, width] to visual tokens [n, tokens, d_model]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from encoder.encoder_config import ConnectorConfig, ConnectorKind, TowerConfig
from encoder.tower import build_norm, gelu


def pixel_shuffle(x: Tensor, reduction: int) -> Tensor:
    """Joins reduction x reduction neighbours into one wider token, row by row within the cell.

    [n, side * side, width] to [n, (side / reduction)^2, reduction^2 * width]. Reference: the order of
    Idefics3Connector.pixel_shuffle.
    """
    n, patches, width = x.shape
    side = round(patches**0.5)
    cells = side // reduction
    x = x.view(n, cells, reduction, cells, reduction * width).transpose(2, 3)
    return x.reshape(n, cells * cells, reduction * reduction * width)


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
        n, patches, width = x.shape
        side = round(patches**0.5)
        grid = x.transpose(1, 2).reshape(n, width, side, side)
        pooled = F.avg_pool2d(grid, self.reduction, ceil_mode=True, count_include_pad=False)
        return self.proj(self.norm(pooled.flatten(2).transpose(1, 2)))


class MlpConnector(nn.Module):
    """Joined patches (none at reduction 1, as in LLaVA), a norm where set, two layers with a GELU between."""

    def __init__(self, config: ConnectorConfig, width: int) -> None:
        super().__init__()
        joined = width * config.reduction**2
        self.reduction = config.reduction
        self.activation = config.activation
        self.norm = build_norm(config.norm, joined, config.norm_eps)
        self.fc1 = nn.Linear(joined, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(self.norm(pixel_shuffle(x, self.reduction))), self.activation))


CONNECTORS: dict[ConnectorKind, type[nn.Module]] = {
    "pixel_shuffle": PixelShuffle,
    "average_pool": AveragePool,
    "mlp": MlpConnector,
}


def build_connector(config: ConnectorConfig, tower: TowerConfig) -> nn.Module:
    return CONNECTORS[config.kind](config, tower.width)
