"""Mistral 3, Ministral 3 and Pixtral: images at their own size, with a break after each row of tokens.

Reference: transformers' Mistral 3, LLaVA and Pixtral models and the Pixtral processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from encoder.encoder_config import Activation, ConnectorConfig, EncoderConfig, EncoderConfigError
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from llm.text_config import class_defaults
from preprocess.stage import PreprocessSpec
from preprocess.types import TileGrid, Variant
from vlm.families.base import Family, Json, Size
from vlm.families.own_size.pixtral import pixtral_resize, pixtral_sources, pixtral_tower
from vlm.families.vision import ACTIVATIONS, CLIP_PIXELS, normalisation, resample_of
from vlm.prompt import ImageFormat, Piece, PromptTokenizer, Rows

# Tekken's words. What wrote tokenizer.json before transformers 5 put another pattern there.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_IDS = 100_000  # at least
ROW, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_LICENCE = "Apache-2.0"
# What stands for a part of a Mistral 3 config that is left out as a whole.
_VISION: dict[str, Any] = {"patch_size": 14}
_TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131072,
}

_MINISTRAL3 = class_defaults("ministral3") | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def _merge(config: Json) -> int:
    """Patches merged per side: none in Pixtral."""
    return int(config.get("spatial_merge_size", 2)) if config.get("model_type") == "mistral3" else 1


def _activation(config: Json) -> Activation:
    name = config.get("projector_hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise EncoderConfigError(f"projector_hidden_act must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def encoder_mistral3(config: Json, processor: Json) -> EncoderConfig:
    if config.get("vision_feature_layer", -1) != -1:
        raise EncoderConfigError("vision_feature_layer must be -1")
    text = decoder_mistral3(config)
    connector = ConnectorConfig(
        "mlp",
        _merge(config),
        text.d_model,
        intermediate=text.d_model,
        norm="rms",
        norm_eps=text.norm_eps,
        activation=_activation(config),
        bias=bool(config.get("multimodal_projector_bias", False)),
        norm_patches=True,
        merged=True,
    )
    tower = pixtral_tower(config.get("vision_config") or _VISION)
    return EncoderConfig(tower, connector, normalisation(CLIP_PIXELS | dict(processor)))


def encoder_pixtral(config: Json, processor: Json) -> EncoderConfig:
    taken = (config.get("vision_feature_layer", -2), config.get("vision_feature_select_strategy", "default"))
    if taken != (-1, "full"):
        raise EncoderConfigError("vision_feature_layer must be -1, with the strategy 'full'")
    width = decoder_pixtral(config).d_model
    connector = ConnectorConfig(
        "mlp",
        1,
        width,
        intermediate=width,
        activation=_activation(config),
        bias=bool(config.get("multimodal_projector_bias", True)),
    )
    tower = pixtral_tower(config.get("vision_config") or {})
    return EncoderConfig(tower, connector, normalisation(CLIP_PIXELS | dict(processor)))


def decoder_mistral3(config: Json) -> DecoderConfig:
    text = {"model_type": "mistral", **(config.get("text_config") or _TEXT)}
    tied = bool(config.get("tie_word_embeddings", True))
    if text["model_type"] == "ministral3":
        return _ministral3(text, tied)
    return DecoderConfig.from_hf(text, tied=tied)


def _ministral3(text: Json, tied: bool) -> DecoderConfig:
    """A Mistral with stretched rope. Queries are scaled from the position on up to which rope was trained, so
    that is as far as this one goes."""
    values = {**_MINISTRAL3, **text, "model_type": "mistral"}
    rope = dict(values["rope_parameters"])
    for key in ("llama_4_scaling_beta", "max_position_embeddings"):
        rope.pop(key, None)
    plain = DecoderConfig.from_hf(values | {"rope_parameters": rope}, tied=tied)
    trained = rope.get("original_max_position_embeddings") or plain.max_positions
    return replace(plain, max_positions=min(plain.max_positions, int(trained)))


def decoder_pixtral(config: Json) -> DecoderConfig:
    text = {"model_type": "mistral"} | dict(config.get("text_config") or {})
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return DecoderConfig.from_hf(text, tied=tied)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    """The processor rounds up to whole cells, whatever its own patch_size."""
    tower = pixtral_tower(config.get("vision_config") or _VISION)
    cell = tower.patch_size * _merge(config)
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(pixtral_resize(processor, cell, cell), variant=variant, resample=resample)


@dataclass(frozen=True)
class BreakFormat:
    """A run for each row of tokens; a break behind each but the last, which the image's end follows."""

    row_id: int
    geometry: VisionGeometry
    placeholder: str = ROW

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        rows, cols = self.geometry.cells(grid)
        pieces: list[Piece] = []
        for row in range(rows):
            pieces += [Rows(cols, row * cols), BREAK if row + 1 < rows else END]
        return pieces


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return BreakFormat(tokenizer.token_id(ROW), geometry)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    connector = {}
    if config.connector.merged:
        connector["norm.weight"] = Source(("norm.weight",))
        connector["merge.weight"] = Source(("patch_merger.merging_layer.weight",), "channel_major")
    for leaf in ("weight", "bias") if config.connector.bias else ("weight",):
        connector[f"fc1.{leaf}"] = Source((f"linear_1.{leaf}",))
        connector[f"fc2.{leaf}"] = Source((f"linear_2.{leaf}",))
    names = VisualNames(
        tower_prefixes=("vision_tower.", "model.vision_tower."),
        connector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
        tower=pixtral_sources(config.tower.num_layers),
        connector=connector,
        text_prefixes=("language_model.", "model.language_model.", "lm_head."),
    )
    return (names,)


def split(config: Json) -> str:
    """Of Tekken's vocabularies, which are large."""
    major = str(config.get("transformers_version") or "0").partition(".")[0]
    vocab_size = (config.get("text_config") or _TEXT).get("vocab_size", 0)
    return WORDS if major.isdigit() and int(major) < 5 and vocab_size > _TEKKEN_IDS else ""


_TEXT_NAMES = TextNames(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    others=("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
)
MISTRAL3 = Family(
    title="Mistral 3, Ministral 3",
    model_types=("mistral3",),
    processors=("PixtralImageProcessor",),
    sizes=(
        Size("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "24B", _LICENCE),
        Size("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "24B", _LICENCE),
        Size("mistralai/Ministral-3-3B-Instruct-2512-BF16", "3B", _LICENCE),
    ),
    tied_default=True,
    text_type="mistral",
    encoder=encoder_mistral3,
    decoder=decoder_mistral3,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=_TEXT_NAMES,
    split=split,
    parts={"text_config": ("mistral", "ministral3"), "vision_config": ("pixtral",)},
)
PIXTRAL = Family(
    title="Pixtral",
    model_types=("llava",),
    processors=("PixtralImageProcessor",),
    sizes=(Size("mistral-community/pixtral-12b", "12B", _LICENCE),),
    tied_default=None,
    text_type="mistral",
    encoder=encoder_pixtral,
    decoder=decoder_pixtral,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=_TEXT_NAMES,
    parts={"text_config": ("mistral",), "vision_config": ("pixtral",)},
)
