"""PaddleOCR-VL: SigLIP turned by row and column, 2x2 patches merged, an ERNIE decoder with M-RoPE.

Reference: transformers' PaddleOCR-VL model and processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from llm.rope_positions import chunked_axes
from llm.text_config import class_defaults
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.own_size import qwen_vl
from vlm.families.own_size.mrope import mrope_decoder
from vlm.families.vision import (
    ACTIVATIONS,
    CLIP_PIXELS,
    PlainFormat,
    normalisation,
    resample_of,
    siglip_sources,
    square,
)
from vlm.prompt import ImageFormat, PromptTokenizer

ROW = "<|IMAGE_PLACEHOLDER|>"
_SECTIONS = (16, 24, 24)
_BOUNDS = (384 * 384, 1536 * 1536)
_PROJECTOR_EPS = 1e-5
# What PaddleOCRVisionConfig and PaddleOCRTextConfig leave out.
_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_TEXT = class_defaults("paddleocr_vl_text") | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0}


def tower(config: Json) -> TowerConfig:
    vision = _VISION | dict(config.get("vision_config") or {})
    if vision["num_channels"] != 3 or vision["hidden_act"] not in ACTIVATIONS:
        raise EncoderConfigError("vision_config: num_channels or hidden_act is not supported")
    patch = square(vision["patch_size"], "patch_size")
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        intermediate=vision["intermediate_size"],
        image_size=0,
        patch_size=patch,
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=vision["layer_norm_eps"],
        table="centres",
        table_side=square(vision["image_size"], "image_size") // patch,
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
        norm_eps=_PROJECTOR_EPS,
        norm_patches=True,
    )
    return EncoderConfig(seen, connector, normalisation(CLIP_PIXELS | dict(processor)))


def decoder(config: Json) -> DecoderConfig:
    """A Llama whose linears have biases all or none. The decoder's keys are the outer config's own in older
    checkpoints."""
    text = _TEXT | dict(config.get("text_config") or config)
    tied = any(keys.get("tie_word_embeddings", True) for keys in (config, text))
    biases = dict.fromkeys(("attention_bias", "mlp_bias"), bool(text.get("use_bias")))
    return mrope_decoder(text | biases, "llama", _SECTIONS, chunked_axes, tied=tied)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    rule = qwen_vl.area_rule(processor, tower(config), qwen_vl.merge_of(config), _BOUNDS, frames=1)
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(replace(rule, grows_sides=True), variant=variant, resample=resample)


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return PlainFormat(tokenizer.token_id(ROW), geometry, ROW, shaped=True)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    parts = {"norm": "pre_norm", "fc1": "linear_1", "fc2": "linear_2"}
    positions = Source(("embeddings.position_embedding.weight",), "positions")
    names = VisualNames(
        tower_prefixes=("visual.vision_model.", "model.visual.vision_model."),
        connector_prefixes=("mlp_AR.", "model.projector."),
        tower=siglip_sources(config.tower.num_layers) | {"pos_embed": positions},
        connector={
            f"{ours}.{leaf}": Source((f"{theirs}.{leaf}",))
            for ours, theirs in parts.items()
            for leaf in ("weight", "bias")
        },
        text_prefixes=("model.", "language_model.", "lm_head."),
        unused=("head.", "embeddings.packing_position_embedding."),
    )
    return (names,)


FAMILY = Family(
    title="PaddleOCR-VL",
    model_types=("paddleocr_vl",),
    processors=("PaddleOCRVLImageProcessor",),
    sizes=(Size("PaddlePaddle/PaddleOCR-VL", "0.9B", "Apache-2.0"),),
    tied_default=True,
    text_type="paddleocr_vl_text",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    prompts={
        "text": "OCR:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
        "chart": "Chart Recognition:",
    },
    text_names=TextNames(
        prefixes=("model.language_model.", "model."),
        others=("visual.", "model.visual.", "mlp_AR.", "model.projector."),
    ),
)
