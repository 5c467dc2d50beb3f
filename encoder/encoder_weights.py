"""Builds an Encoder from a checkpoint's tensors or an open_clip tower. Only safetensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from encoder.connector import Deepstack, WithNewline, build_connector
from encoder.encoder_config import ConnectorConfig, ConnectorKind, EncoderConfig
from encoder.encoder_model import Encoder
from encoder.openclip import open_clip_tower
from encoder.revision import open_clip_revision, open_clip_trunk, revision_of
from encoder.tensor_files import CheckpointError, TensorEntry, check_names, read_header, read_index
from encoder.tensor_names import TEMPORAL_PATCH, Source, VisualNames
from encoder.tower import Tower

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
OPEN_CLIP_TRUNK = "visual.trunk."

Sources = Mapping[str, Source]


def load_encoder(
    directory: Path,
    config: EncoderConfig,
    names: VisualNames,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Encoder:
    """Tower and connector of a checkpoint directory, whose family gives `config` and `names`.

    Raises CheckpointError: a name that is missing, unexpected or of another shape.
    """
    entries = {name: entry for name, entry in read_index(directory).items() if names.is_visual(name)}
    tower, connector = _meta_modules(config)
    tower_sources, connector_sources = names.resolve(entries)
    check_names(
        _expected(tower, tower_sources, config) | _expected(connector, connector_sources, config), entries
    )
    tower.load_state_dict(_read(entries, tower_sources, dtype, config), assign=True)
    connector.load_state_dict(_read(entries, connector_sources, dtype, config), assign=True)
    return Encoder(config, tower.to(device), connector.to(device), revision_of(config, entries))


def load_open_clip(
    name: str,
    *,
    d_model: int,
    connector: ConnectorKind = "average_pool",
    reduction: int = 2,
    intermediate: int = 0,
    seed: int = 0,
    pretrained: Path | None = None,
    connector_weights: Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Encoder:
    """An open_clip SigLIP tower with a connector into a decoder `d_model` wide.

    `pretrained` is open_clip's own safetensors file (`visual.trunk.*`), `connector_weights` one with the
    connector's parameters under their names here; what has no file gets weights drawn from `seed`.
    Raises EncoderConfigError or CheckpointError.
    """
    config = EncoderConfig(
        open_clip_tower(name), ConnectorConfig(connector, reduction, d_model, intermediate)
    )
    generator = torch.Generator().manual_seed(seed)
    tower, joiner = _meta_modules(config)
    trunk = open_clip_trunk(pretrained) if pretrained is not None else None
    joined = read_header(connector_weights) if connector_weights is not None else None
    _fill(tower, config, trunk, OPEN_CLIP_TRUNK, generator, dtype)
    _fill(joiner, config, joined, "", generator, dtype)
    revision = open_clip_revision(config, name, pretrained, connector_weights, seed)
    return Encoder(config, tower.to(device), joiner.to(device), revision)


def bucketed_positions(side: int) -> Tensor:
    """Position index of each patch of a full tile, int64 [side * side].

    Idefics3 looks a patch's position up as a fraction of the side among float32 boundaries. Rounding puts
    some patches one row or column early (sides 19, 25, 29, ...; not 14, 16, 24, 27, 32), and `transformers`
    is the reference.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    buckets = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (buckets[:, None] * side + buckets).flatten()


def _meta_modules(config: EncoderConfig) -> tuple[Tower, nn.Module]:
    with torch.device("meta"):
        if config.deepstack:
            return Tower(config.tower), Deepstack(config)
        if config.packing:
            return Tower(config.tower), WithNewline(config)
        return Tower(config.tower), build_connector(config.connector, config.tower)


def _expected(module: nn.Module, sources: Sources, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors that `sources` names."""
    shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    expected: dict[str, tuple[int, ...]] = {}
    for key, source in sources.items():
        shape = (shapes[key][0] // len(source.names), *shapes[key][1:])
        if source.fold in ("positions", "bucketed_positions"):
            shape = (config.tower.num_positions, config.tower.width)
        elif source.fold == "transpose":
            shape = shape[::-1]
        elif source.fold == "convolution":
            side = config.connector.reduction
            shape = (shape[0], shape[1] // side**2, side, side)
        elif source.fold == "class_token":
            shape = shape[2:]
        elif source.fold == "sum_temporal":
            shape = (*shape[:2], TEMPORAL_PATCH, *shape[2:])
        expected |= dict.fromkeys(source.names, shape)
        if source.by:
            expected[source.by] = shape[:1]
    return expected


def _read(
    entries: Mapping[str, TensorEntry], sources: Sources, dtype: torch.dtype, config: EncoderConfig
) -> dict[str, Tensor]:
    """Reads only the named tensors, file by file, each converted as it is read unless it is folded."""
    wanted = {name for source in sources.values() for name in source.all_names}
    # These compute: in float32, whatever the dtype.
    rounds = ("layer_scale", "plus_one", "sum_temporal", "output_scale")
    folded = {name for source in sources.values() if source.fold in rounds for name in source.all_names}
    for name in sorted(wanted):
        if entries[name].dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{name} has dtype {entries[name].dtype}, which is not a floating-point type"
            )
    parts: dict[str, Tensor] = {}
    for file in sorted({entries[name].file for name in wanted}):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(wanted):
                if entries[name].file == file:
                    parts[name] = handle.get_tensor(name).to(torch.float32 if name in folded else dtype)
    return {key: _made(source, parts, config).to(dtype) for key, source in sources.items()}


def _made(source: Source, parts: dict[str, Tensor], config: EncoderConfig) -> Tensor:
    """One parameter of ours out of its tensors, which are let go; a scale serves weight and bias."""
    tensors = [parts.pop(name) for name in source.names]
    joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if source.fold == "bucketed_positions":
        return joined[bucketed_positions(config.geometry.grid_side)][None]
    if source.fold == "positions":
        return joined[None]
    if source.fold == "class_token":
        return joined[None, None]
    if source.fold == "convolution":
        return joined.permute(0, 2, 3, 1).flatten(1)
    if source.fold == "output_scale":
        return joined * config.connector.output_scale
    if source.fold == "transpose":
        return joined.t().contiguous()
    if source.fold == "channel_major":
        return joined.unflatten(1, (-1, config.connector.reduction**2)).transpose(1, 2).flatten(1)
    if source.fold == "plus_one":
        return joined + 1
    if source.fold == "sum_temporal":
        return joined.sum(2)
    if source.fold == "layer_scale":
        return joined * parts[source.by].view(-1, *[1] * (joined.dim() - 1))
    return joined


def _fill(
    module: nn.Module,
    config: EncoderConfig,
    entries: dict[str, TensorEntry] | None,
    prefix: str,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> None:
    """Weights from a file that holds exactly the module's parameters under `prefix`; without one, drawn."""
    if entries is None:
        module.load_state_dict(_draw(module, generator, dtype), assign=True)
        return
    sources = {key: Source((prefix + key,)) for key in module.state_dict()}
    check_names(_expected(module, sources, config), entries)
    module.load_state_dict(_read(entries, sources, dtype, config), assign=True)


def _draw(module: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms at one, biases at zero, everything else normal with its fan-in's scale."""
    drawn = {}
    for name, weight in sorted(module.state_dict().items()):
        if weight.dim() > 1:
            fan_in = weight[0].numel() if name != "pos_embed" else weight.shape[-1]
            values = torch.randn(weight.shape, generator=generator) * fan_in**-0.5
        else:
            values = torch.full(weight.shape, float(name.endswith("weight")))
        drawn[name] = values.to(dtype)
    return drawn
