"""What several families read alike: towers' settings and names, pixel normalisation, plain prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encoder.encoder_config import Activation, EncoderConfigError, Normalisation, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source
from preprocess.types import TileGrid
from vlm.families.base import Json
from vlm.prompt import Piece, Rows

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
CLIP_PIXELS: dict[str, Any] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}


@dataclass(frozen=True)
class PlainFormat:
    """Only the visual tokens, without markers of its own: the template writes those there are."""

    row_id: int
    geometry: VisionGeometry
    placeholder: str = "<image>"
    shaped: bool = False  # rope tells rows and columns apart

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        return (Rows(self.geometry.rows(grid), 0, self.geometry.cells(grid) if self.shaped else None),)


def siglip_tower(vision: Json) -> TowerConfig:
    """From a vision_config whose left-out keys are filled in. Raises EncoderConfigError."""
    if vision["num_channels"] != 3:
        raise EncoderConfigError("vision_config: num_channels must be 3")
    if vision["hidden_act"] not in ACTIVATIONS:
        raise EncoderConfigError(f"vision_config: hidden_act must be one of {', '.join(ACTIVATIONS)}")
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        intermediate=vision["intermediate_size"],
        image_size=square(vision["image_size"], "image_size"),
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=vision["layer_norm_eps"],
    )


def siglip_sources(num_layers: int) -> dict[str, Source]:
    """Where `transformers` keeps a SigLIP tower's parameters behind their prefix; q, k and v are one matrix
    here. The position table is left to the family."""
    sources = {}
    for leaf in ("weight", "bias"):
        sources[f"patch_embed.proj.{leaf}"] = Source((f"embeddings.patch_embedding.{leaf}",))
        sources[f"norm.{leaf}"] = Source((f"post_layernorm.{leaf}",))
        for index in range(num_layers):
            ours, theirs = f"blocks.{index}", f"encoder.layers.{index}"
            sources |= {
                f"{ours}.norm1.{leaf}": Source((f"{theirs}.layer_norm1.{leaf}",)),
                f"{ours}.norm2.{leaf}": Source((f"{theirs}.layer_norm2.{leaf}",)),
                f"{ours}.attn.qkv.{leaf}": Source(
                    tuple(f"{theirs}.self_attn.{part}_proj.{leaf}" for part in "qkv")
                ),
                f"{ours}.attn.proj.{leaf}": Source((f"{theirs}.self_attn.out_proj.{leaf}",)),
                f"{ours}.mlp.fc1.{leaf}": Source((f"{theirs}.mlp.fc1.{leaf}",)),
                f"{ours}.mlp.fc2.{leaf}": Source((f"{theirs}.mlp.fc2.{leaf}",)),
            }
    return sources


def normalisation(processor: Json) -> Normalisation:
    """From an image processor's settings; 0.5 is the mean and deviation where it is silent."""
    scale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
    if not processor.get("do_normalize", True):
        return Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), scale)
    mean, std = (_channels(processor, key) for key in ("image_mean", "image_std"))
    if not all(std):
        raise EncoderConfigError("image processor: image_std must not be 0")
    return Normalisation(mean, std, scale)


def _channels(processor: Json, key: str) -> tuple[float, float, float]:
    values: Any = processor.get(key, 0.5)
    values = [values] * 3 if isinstance(values, int | float) else list(values)
    if len(values) != 3:
        raise EncoderConfigError(f"image processor: {key} must have three values")
    return float(values[0]), float(values[1]), float(values[2])


def square(size: int | list[int], name: str) -> int:
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise EncoderConfigError(f"vision_config: {name} must be square")
    return size[0]


def resample_of(processor: Json, default: int) -> int:
    """The number of a Pillow filter."""
    resample = processor.get("resample", default)
    if not isinstance(resample, int):
        raise EncoderConfigError("image processor: resample must be the number of a Pillow filter")
    return resample
