"""GLM-OCR: images at their own size, 2x2 patches merged, a GLM decoder that turns half of each head (M-RoPE).

Reference: transformers' GLM-OCR model and GLM-4.6V processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import TEMPORAL_PATCH, Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from llm.rope_positions import chunked_axes
from llm.text_config import class_defaults
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.own_size import qwen_vl
from vlm.families.own_size.mrope import mrope_decoder
from vlm.families.vision import ACTIVATIONS, CLIP_PIXELS, PlainFormat, normalisation, resample_of, square
from vlm.prompt import ImageFormat, PromptTokenizer

ROW = "<|image|>"
_SECTIONS = (8, 12, 12)
_FRAMES = TEMPORAL_PATCH  # of a still image; the processor's bounds count all of them
_BOUNDS = (112 * 112, 28 * 28 * 15000)
_MERGER_EPS = 1e-5
_GATED = 3  # the merger's hidden width over its own
# What GlmOcrVisionConfig and GlmOcrTextConfig leave out.
_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "hidden_act": "silu",
    "attention_bias": True,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": TEMPORAL_PATCH,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
_TEXT = class_defaults("glm_ocr_text") | {"rms_norm_eps": 1e-5}


def tower(config: Json) -> TowerConfig:
    vision = qwen_vl.checked(_VISION | dict(config.get("vision_config") or {}))
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        image_size=0,
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=vision["rms_norm_eps"],
        norm="rms",
        final_norm="rms",
        qkv_bias=bool(vision["attention_bias"]),
        linear_bias=bool(vision["attention_bias"]),
        head_norm=True,
        gated=True,
        table="none",
        rope="axial",
        rope_theta=qwen_vl.rope_theta(vision),
    )


def encoder(config: Json, processor: Json) -> EncoderConfig:
    seen, width = tower(config), decoder(config).d_model
    out = (_VISION | dict(config.get("vision_config") or {}))["out_hidden_size"]
    if out != width:
        raise EncoderConfigError(f"vision_config: out_hidden_size must be the decoder's {width}")
    connector = ConnectorConfig(
        "gated_mlp",
        qwen_vl.merge_of(config),
        width,
        intermediate=_GATED * width,
        norm_eps=_MERGER_EPS,
        activation=seen.activation,
    )
    return EncoderConfig(seen, connector, normalisation(CLIP_PIXELS | dict(processor)))


def decoder(config: Json) -> DecoderConfig:
    """Either flag ties the head, as in Qwen's."""
    text = _TEXT | dict(config.get("text_config") or {})
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return mrope_decoder(text, "glm_ocr_text", _SECTIONS, chunked_axes, tied=tied)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    rule = qwen_vl.area_rule(processor, tower(config), qwen_vl.merge_of(config), _BOUNDS)
    rule = replace(
        rule,
        min_pixels=-(-rule.min_pixels // _FRAMES),
        max_pixels=rule.max_pixels // _FRAMES,
        grows_whole=True,
    )
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(rule, variant=variant, resample=resample)


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return PlainFormat(tokenizer.token_id(ROW), geometry, ROW, shaped=True)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    joined = {"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc2": ("mlp.down_proj",)}
    connector = {
        "merge.weight": Source(("downsample.weight",), "convolution"),
        "merge.bias": Source(("downsample.bias",)),
        "proj.weight": Source(("merger.proj.weight",)),
        "norm.weight": Source(("merger.post_projection_norm.weight",)),
        "norm.bias": Source(("merger.post_projection_norm.bias",)),
        "fc1.weight": Source(("merger.gate_proj.weight", "merger.up_proj.weight")),
        "fc2.weight": Source(("merger.down_proj.weight",)),
    }
    (names,) = qwen_vl.qwen_names(config, joined, connector)
    tower = {name: source for name, source in names.tower.items() if _has(config.tower, name)}
    tower["patch_embed.proj.bias"] = Source(("patch_embed.proj.bias",))
    tower["norm.weight"] = Source(("post_layernorm.weight",))
    for block in (f"blocks.{index}.attn." for index in range(config.tower.num_layers)):
        for index, part in enumerate("qk"):
            tower[f"{block}head_norms.{index}.weight"] = Source((f"{block}{part}_norm.weight",))
    return (replace(names, tower=tower),)


def _has(tower: TowerConfig, name: str) -> bool:
    return tower.linear_bias or not name.endswith(".bias")


FAMILY = Family(
    title="GLM-OCR",
    model_types=("glm_ocr",),
    processors=("Glm46VImageProcessor",),
    sizes=(Size("zai-org/GLM-OCR", "0.9B", "MIT"),),
    tied_default=None,
    text_type="glm_ocr_text",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=TextNames(
        prefixes=("model.language_model.", "model."),
        others=("visual.", "model.visual."),
    ),
)
