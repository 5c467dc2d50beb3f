"""What an encoder is made of, read from a checkpoint's JSON files. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from encoder.geometry import TowerShape, VisionGeometry

Activation = Literal["gelu", "gelu_tanh"]
ConnectorKind = Literal["pixel_shuffle", "average_pool", "mlp"]

FAMILIES = ("smolvlm", "idefics3")
HF_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Checkpoints leave out what equals their family's default: SmolVLMVisionConfig, Idefics3VisionConfig.
HF_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
HF_TEXT_WIDTH = 4096  # default hidden_size of the Llama, Mistral, Qwen2 and Qwen3 configurations


class EncoderConfigError(ValueError):
    """A configuration this encoder can't be built from; the message names the field."""


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A SigLIP vision transformer without its pooling head."""

    width: int
    num_layers: int
    num_heads: int
    intermediate: int  # width of the MLP's hidden layer
    image_size: int  # pixels, square tiles
    patch_size: int  # pixels
    activation: Activation = "gelu_tanh"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "intermediate", "image_size", "patch_size"):
            if getattr(self, name) < 1:
                raise EncoderConfigError(f"tower: {name} must be at least 1")
        if self.width % self.num_heads:
            raise EncoderConfigError("tower: width must be a multiple of num_heads")
        if self.patch_size > self.image_size:
            raise EncoderConfigError("tower: patch_size must not exceed image_size")
        if self.activation not in get_args(Activation):
            raise EncoderConfigError(f"tower: activation must be one of {', '.join(get_args(Activation))}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """How patches become visual tokens of the decoder's width."""

    kind: ConnectorKind
    reduction: int  # patches joined per side
    d_model: int  # the decoder's width
    intermediate: int = 0  # hidden width of the `mlp` kind

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConnectorKind):
            raise EncoderConfigError(f"connector: kind must be one of {', '.join(get_args(ConnectorKind))}")
        if self.reduction < 1 or self.d_model < 1:
            raise EncoderConfigError("connector: reduction and d_model must be at least 1")
        if (self.kind == "mlp") != (self.intermediate > 0):
            raise EncoderConfigError("connector: intermediate belongs to the mlp kind, which needs it")


@dataclass(frozen=True, slots=True)
class Normalisation:
    """pixel -> (pixel * scale - mean) / std, per channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    tower: TowerConfig
    connector: ConnectorConfig
    normalisation: Normalisation = field(default_factory=Normalisation)

    def __post_init__(self) -> None:
        side = self.geometry.grid_side
        if self.connector.kind != "average_pool" and side % self.connector.reduction:
            raise EncoderConfigError(
                f"connector: {self.connector.kind} at reduction {self.connector.reduction} "
                f"doesn't fit the tower's {side}x{side} patches"
            )

    @property
    def geometry(self) -> VisionGeometry:
        return VisionGeometry(self.tower.image_size, self.tower.patch_size, self.connector.reduction)

    @property
    def shape(self) -> TowerShape:
        """What its FLOPs and bytes follow from."""
        return TowerShape(
            geometry=self.geometry,
            num_layers=self.tower.num_layers,
            width=self.tower.width,
            intermediate=self.tower.intermediate,
            d_model=self.connector.d_model,
            connector=self.connector.kind,
            connector_intermediate=self.connector.intermediate,
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> EncoderConfig:
        """From config.json and the image processor's settings of a SmolVLM or Idefics3 checkpoint.

        Raises EncoderConfigError where the checkpoint asks for something this encoder doesn't do.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise EncoderConfigError(f"model_type must be one of {', '.join(FAMILIES)}")
        vision = HF_VISION_DEFAULTS | dict(config.get("vision_config") or {})
        if vision["num_channels"] != 3:
            raise EncoderConfigError("vision_config: num_channels must be 3")
        if vision["hidden_act"] not in HF_ACTIVATIONS:
            raise EncoderConfigError(f"vision_config: hidden_act must be one of {', '.join(HF_ACTIVATIONS)}")
        tower = TowerConfig(
            width=vision["hidden_size"],
            num_layers=vision["num_hidden_layers"],
            num_heads=vision["num_attention_heads"],
            intermediate=vision["intermediate_size"],
            image_size=_square(vision["image_size"], "image_size"),
            patch_size=_square(vision["patch_size"], "patch_size"),
            activation=HF_ACTIVATIONS[vision["hidden_act"]],
            norm_eps=vision["layer_norm_eps"],
        )
        text = config.get("text_config") or {}
        connector = ConnectorConfig(
            "pixel_shuffle", config.get("scale_factor", 2), text.get("hidden_size", HF_TEXT_WIDTH)
        )
        return EncoderConfig(tower, connector, _normalisation(processor or {}))

    @staticmethod
    def from_directory(directory: Path) -> EncoderConfig:
        """Reads a Hugging Face directory's JSON files; raises EncoderConfigError if they can't be used."""
        config = _read_json(directory / "config.json")
        if config is None:
            raise EncoderConfigError("the checkpoint has no readable config.json")
        nested = (_read_json(directory / "processor_config.json") or {}).get("image_processor")
        return EncoderConfig.from_hf(config, nested or _read_json(directory / "preprocessor_config.json"))


def _normalisation(processor: Mapping[str, Any]) -> Normalisation:
    scale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
    if not processor.get("do_normalize", True):
        return Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), scale)
    channels: list[tuple[float, float, float]] = []
    for key in ("image_mean", "image_std"):
        values = processor.get(key, 0.5)
        values = [values] * 3 if isinstance(values, int | float) else list(values)
        if len(values) != 3:
            raise EncoderConfigError(f"image processor: {key} must have three values")
        channels.append((float(values[0]), float(values[1]), float(values[2])))
    if not all(channels[1]):
        raise EncoderConfigError("image processor: image_std must not be 0")
    return Normalisation(channels[0], channels[1], scale)


def _square(size: int | list[int], name: str) -> int:
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise EncoderConfigError(f"vision_config: {name} must be square")
    return size[0]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EncoderConfigError(f"the checkpoint's {path.name} can't be read") from error
    if not isinstance(content, dict):
        raise EncoderConfigError(f"the checkpoint's {path.name} must be a JSON object")
    return content
