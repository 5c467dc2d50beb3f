"""Pixtral's tower, which several families share: images at their own size, no position table, RMS norms."""

from __future__ import annotations

from typing import Any

from encoder.encoder_config import EncoderConfigError, TowerConfig
from encoder.tensor_names import Source
from preprocess.own_size import EdgeResize
from vlm.families.base import Json
from vlm.families.vision import ACTIVATIONS, square

# What PixtralVisionConfig and PixtralImageProcessor leave out.
_VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_EDGE, _PATCH = 1024, 16  # pixels, where the processor is silent
_EPS = 1e-5


def pixtral_tower(vision: Json) -> TowerConfig:
    """From a vision_config. Raises EncoderConfigError."""
    vision = _VISION | dict(vision)
    rope = vision.get("rope_parameters") or {}
    if vision["num_channels"] != 3 or vision["hidden_act"] not in ACTIVATIONS:
        raise EncoderConfigError("vision_config: num_channels or hidden_act is not supported")
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        intermediate=vision["intermediate_size"],
        image_size=0,
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=_EPS,
        norm="rms",
        final_norm=None,
        first_norm="rms",
        qkv_bias=False,
        patch_bias=False,
        linear_bias=False,
        gated=True,
        table="none",
        rope="alternating",
        rope_theta=float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0),
    )


def pixtral_resize(processor: Json, multiple: int = 0, cell: int = 1) -> EdgeResize:
    """multiple: pixels that sides are rounded up to; 0: what the processor says. cell: pixels of a token.

    Raises EncoderConfigError.
    """
    if not processor.get("do_resize", True) or processor.get("do_center_crop"):
        raise EncoderConfigError("image processor: do_resize must be true, and do_center_crop false")
    size = processor.get("size") or {"longest_edge": _EDGE}
    edge = size.get("longest_edge") if isinstance(size, dict) else size
    patch = processor.get("patch_size") or _PATCH
    patch = patch.get("height") if isinstance(patch, dict) else patch
    if not isinstance(edge, int) or not isinstance(patch, int):
        raise EncoderConfigError("image processor: size must have a longest_edge, and patch_size a height")
    return EdgeResize(edge, multiple or patch, min_side=cell)


def pixtral_sources(num_layers: int) -> dict[str, Source]:
    sources = {
        "patch_embed.proj.weight": Source(("patch_conv.weight",)),
        "first_norm.weight": Source(("ln_pre.weight",)),
    }
    for index in range(num_layers):
        ours, theirs = f"blocks.{index}", f"transformer.layers.{index}"
        names = {
            "norm1": ("attention_norm",),
            "attn.qkv": tuple(f"attention.{part}_proj" for part in "qkv"),
            "attn.proj": ("attention.o_proj",),
            "norm2": ("ffn_norm",),
            "mlp.fc1": ("feed_forward.gate_proj", "feed_forward.up_proj"),
            "mlp.fc2": ("feed_forward.down_proj",),
        }
        sources |= {
            f"{ours}.{mine}.weight": Source(tuple(f"{theirs}.{name}.weight" for name in parts))
            for mine, parts in names.items()
        }
    return sources
