"""Qwen3-VL, dense: Qwen2-VL's images and merging, a stretched position table, rows for the first layers.

Reference: transformers' Qwen3-VL model and processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.tensor_names import TEMPORAL_PATCH, Source, VisualNames
from llm.decoder_config import ConfigError, DecoderConfig
from llm.rope_positions import interleaved_axes
from llm.text_config import class_defaults
from vlm.families.base import Family, Json, Size
from vlm.families.own_size import qwen_vl
from vlm.families.own_size.mrope import mrope_decoder
from vlm.families.vision import ACTIVATIONS, CLIP_PIXELS, normalisation, square

_EPS = 1e-6
_SECTIONS = (24, 20, 20)
# What Qwen3VLVisionConfig and Qwen3VLTextConfig leave out.
_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": TEMPORAL_PATCH,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_TEXT = class_defaults("qwen3_vl_text") | {"rope_theta": 500_000.0}
_BOUNDS = (56 * 56, 28 * 28 * 1280)
_LICENCE = "Apache-2.0"


def _vision(config: Json) -> dict[str, Any]:
    return qwen_vl.checked(_VISION | dict(config.get("vision_config") or {}))


def tower(config: Json) -> TowerConfig:
    vision = _vision(config)
    side = math.isqrt(vision["num_position_embeddings"])
    if side**2 != vision["num_position_embeddings"]:
        raise EncoderConfigError("vision_config: num_position_embeddings must be a square")
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        image_size=0,
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=_EPS,
        final_norm=None,
        table="corners",
        table_side=side,
        rope="axial",
        rope_theta=qwen_vl.rope_theta(vision),
    )


def encoder(config: Json, processor: Json) -> EncoderConfig:
    seen, merge = tower(config), qwen_vl.merge_of(config)
    connector = ConnectorConfig(
        "mlp",
        merge,
        decoder(config).d_model,
        intermediate=seen.width * merge**2,
        norm="layer",
        norm_eps=_EPS,
        norm_patches=True,
    )
    pixels = normalisation(CLIP_PIXELS | dict(processor))
    return EncoderConfig(seen, connector, pixels, tuple(_vision(config)["deepstack_visual_indexes"]))


def decoder(config: Json) -> DecoderConfig:
    text = _TEXT | dict(config.get("text_config") or {})
    tied = bool(config.get("tie_word_embeddings", False))
    plain = mrope_decoder(text, "qwen3", _SECTIONS, interleaved_axes, tied=tied)
    deepstack = len(_vision(config)["deepstack_visual_indexes"])
    if deepstack >= plain.num_layers:
        raise ConfigError("deepstack_visual_indexes must be fewer than the decoder's layers")
    return replace(plain, deepstack=deepstack)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    def merger(ours: str, theirs: str) -> dict[str, Source]:
        names = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
        return {
            f"{ours}{mine}.{leaf}": Source((f"{theirs}.{name}.{leaf}",))
            for mine, name in names.items()
            for leaf in ("weight", "bias")
        }

    connector = merger("main." if config.deepstack else "", "merger")
    for index in range(len(config.deepstack)):
        connector |= merger(f"further.{index}.", f"deepstack_merger_list.{index}")
    mlp = {"mlp.fc1": ("mlp.linear_fc1",), "mlp.fc2": ("mlp.linear_fc2",)}
    (names,) = qwen_vl.qwen_names(config, mlp, connector)
    more = {
        "patch_embed.proj.bias": Source(("patch_embed.proj.bias",)),
        "pos_embed": Source(("pos_embed.weight",), "positions"),
    }
    return (replace(names, tower={**names.tower, **more}),)


FAMILY = Family(
    title="Qwen3-VL",
    model_types=("qwen3_vl",),
    processors=("Qwen2VLImageProcessor",),
    sizes=(
        Size("Qwen/Qwen3-VL-2B-Instruct", "2B", _LICENCE),
        Size("Qwen/Qwen3-VL-4B-Instruct", "4B", _LICENCE),
        Size("Qwen/Qwen3-VL-8B-Instruct", "8B", _LICENCE),
        Size("Qwen/Qwen3-VL-32B-Instruct", "32B", _LICENCE),
    ),
    tied_default=False,
    text_type="qwen3_vl_text",
    encoder=encoder,
    decoder=decoder,
    preprocess=qwen_vl.preprocess_by(tower, _BOUNDS),
    image_format=qwen_vl.image_format,
    visual_names=visual_names,
    text_names=qwen_vl.TEXT_NAMES,
)
