"""LLaVA-OneVision: LLaVA-NeXT's canvases, with fewer tokens where there are too many; one tile an image in a
chat with several.

Reference: transformers' LLaVA-OneVision models and processor.
"""

from __future__ import annotations

import re
from typing import Any

from PIL import Image

from encoder.encoder_config import EncoderConfig, EncoderConfigError, TowerConfig
from encoder.packing import Packing
from llm.decoder_config import DecoderConfig
from preprocess.anyres import AnyResTiling
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.packed import llava_next
from vlm.families.vision import CLIP_PIXELS, resample_of

_LAYER = -1
_ASPECT = "anyres_max_9"
_SIDES = range(384, 2305, 384)
_CANVASES = tuple((high, wide) for high in _SIDES for wide in _SIDES)
# LlavaOnevisionConfig's tower.
_WHOLE: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def tower(config: Json) -> TowerConfig:
    return llava_next.tower_of(config, _WHOLE, "full", _LAYER)


def packing(config: Json) -> Packing:
    aspect = config.get("vision_aspect_ratio", _ASPECT)
    found = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(aspect))
    if found is None:
        raise EncoderConfigError("vision_aspect_ratio must be anyres_max_ and a number of tiles")
    return Packing(int(found[1]))


def encoder(config: Json, processor: Json) -> EncoderConfig:
    return llava_next.encoder_of(tower(config), decoder(config), packing(config), config, processor)


def decoder(config: Json) -> DecoderConfig:
    """Either flag ties the head: older checkpoints have the decoder's own alone."""
    text = {"model_type": "qwen2"} | dict(config.get("text_config") or {})
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return DecoderConfig.from_hf(text, tied=tied)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    tile = tower(config).image_size
    cropless = {"do_center_crop": False} | {key: v for key, v in processor.items() if v is not None}
    canvases = llava_next.canvases_of(config, cropless, tile) or _CANVASES
    red, green, blue = (int(mean * 255) for mean in (CLIP_PIXELS | dict(processor))["image_mean"])
    rule = AnyResTiling(tile, canvases, (red, green, blue))
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(rule, variant=variant, resample=resample)


_LICENCE = "Apache-2.0"
FAMILY = Family(
    title="LLaVA-OneVision",
    model_types=("llava_onevision",),
    processors=("LlavaOnevisionImageProcessor",),
    sizes=(
        Size("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "0.5B", _LICENCE),
        Size("llava-hf/llava-onevision-qwen2-7b-ov-hf", "7B", _LICENCE),
        Size("llava-hf/llava-onevision-qwen2-72b-ov-hf", "72B", "Tongyi Qianwen"),
    ),
    tied_default=None,
    text_type="qwen2",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=llava_next.image_format,
    visual_names=llava_next.visual_names,
    text_names=llava_next.TEXT_NAMES,
)
