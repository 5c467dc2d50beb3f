"""Models and accelerators by name, and any Hugging Face directory or `config.json` by path."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from encoder.geometry import TowerShape, VisionGeometry
from llm.cost import CostError, DecoderShape, Machine
from llm.decoder_config import ConfigError, DecoderConfig
from llm.storage import WeightStorage
from preprocess.tiling import tiling_from_json
from preprocess.types import TilingRule
from vlm.checkpoint import Checkpoint
from vlm.config import DEFAULT_MODEL
from vlm.families.registry import find_family
from vlm.hub import Hub, HubError, parse_hub_id


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a plan needs to know of a model; no weights are read."""

    name: str
    title: str
    decoder: DecoderShape
    source: str
    tower: TowerShape | None = None
    tiling: TilingRule | None = None
    directory: Path | None = None
    config: DecoderConfig | None = None  # of a checkpoint that this engine runs
    embedding: WeightStorage = "float32"  # in which that checkpoint's token embeddings lose nothing


def _presets(file: str) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = json.loads(
        resources.files("vlm.plan").joinpath("presets", file).read_text()
    )
    return loaded


def model_names() -> list[str]:
    return list(_presets("models.json"))


def machine_names() -> list[str]:
    return [*_presets("machines.json"), "this", "cuda"]


def load_model(name: str) -> PlannedModel:
    """A preset's name, 'default', a checkpoint directory, or a `config.json`.

    Raises CostError if it is none of these or its sizes make no sense.
    """
    presets = _presets("models.json")
    if name in presets:
        return _from_preset(name, presets[name])
    path = _path(name)
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise CostError(
            f"{name} is not a preset, a hub id, a checkpoint directory or a config.json; "
            f"presets: default, {', '.join(presets)}"
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise CostError(f"{name} is not readable JSON") from None
    if not isinstance(config, dict):
        raise CostError(f"{name} is not a JSON object")
    return _from_config(name, config, config_file.parent)


def _path(name: str) -> Path:
    """A folder or file, or a hub's checkpoint by its JSON files alone. Raises CostError."""
    if name == "default":
        return Path(DEFAULT_MODEL)
    hub_id = None if Path(name).exists() else parse_hub_id(name)
    if hub_id is None:
        return Path(name)
    try:
        return Hub().fetch(hub_id, "config")
    except HubError as error:
        raise CostError(str(error)) from None


def _from_preset(name: str, raw: Mapping[str, Any]) -> PlannedModel:
    decoder = DecoderShape.from_config(raw["config"])
    return PlannedModel(
        name=name,
        title=raw["title"],
        decoder=decoder,
        source=raw["source"],
        tower=_tower_of_preset(raw["vision"], decoder.d_model) if "vision" in raw else None,
        tiling=tiling_from_json(raw["tiling"]) if "tiling" in raw else None,
    )


def _tower_of_preset(vision: Mapping[str, Any], d_model: int) -> TowerShape:
    return TowerShape(
        geometry=VisionGeometry(vision["image_size"], vision["patch_size"], vision["reduction"]),
        num_layers=vision["num_hidden_layers"],
        width=vision["hidden_size"],
        intermediate=vision["intermediate_size"],
        d_model=d_model,
        connector=vision["connector"],
    )


def _from_config(name: str, config: dict[str, Any], directory: Path) -> PlannedModel:
    tower = tiling = None
    checkpoint = Checkpoint(directory, config)
    family = find_family(config)
    if family is not None:
        tower = family.encoder(config, {}).shape
        with contextlib.suppress(ConfigError):  # config.json alone tells nothing of tiles
            tiling = checkpoint.preprocess().rule
    title = "the model that ships with vlm" if name == "default" else name
    return PlannedModel(
        name=name,
        title=title,
        decoder=checkpoint.shape,
        source="its config.json",
        tower=tower,
        tiling=tiling,
        directory=directory,
        config=_decoder_config(checkpoint),
        embedding="bfloat16" if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else "float32",
    )


def _decoder_config(checkpoint: Checkpoint) -> DecoderConfig | None:
    try:
        return checkpoint.decoder
    except ConfigError:
        return None


@cache
def _measured(device: str) -> Machine:
    from vlm.build import check_device
    from vlm.plan.machine.calibration import measure_machine  # imports torch

    check_device(device)
    return measure_machine(quick=True, device=device, dtype="float32" if device == "cpu" else "bfloat16")


def load_machine(name: str) -> Machine:
    """An accelerator's preset, or 'this' or 'cuda': the CPU or GPU at hand, measured now (a few seconds).

    Raises CostError for another name, and SettingsError where torch finds no such device.
    """
    if name == "this" or name.startswith("cuda"):
        return _measured("cpu" if name == "this" else name)
    presets = _presets("machines.json")
    if name not in presets:
        raise CostError(f"{name} is not an accelerator preset; presets: {', '.join(machine_names())}")
    return Machine(**presets[name])
