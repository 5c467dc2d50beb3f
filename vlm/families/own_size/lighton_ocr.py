"""LightOnOCR: pages at their own size through Pixtral's tower, 2x2 patches merged, a Qwen3 decoder.

Reference: transformers' LightOnOCR model and processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.own_size.pixtral import pixtral_resize, pixtral_sources, pixtral_tower
from vlm.families.vision import CLIP_PIXELS, PlainFormat, normalisation, resample_of
from vlm.prompt import ImageFormat, PromptTokenizer

ROW = "<|image_pad|>"
# What stands for a part that config.json leaves out as a whole.
_VISION: dict[str, Any] = {"patch_size": 14, "hidden_act": "silu"}
_TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}


def _merge(config: Json) -> int:
    return int(config.get("spatial_merge_size", 2))


def encoder(config: Json, processor: Json) -> EncoderConfig:
    text = decoder(config)
    connector = ConnectorConfig(
        "mlp",
        _merge(config),
        text.d_model,
        intermediate=text.d_model,
        norm="rms",
        norm_eps=text.norm_eps,
        bias=False,
        norm_patches=True,
        merged=True,
    )
    tower = pixtral_tower(config.get("vision_config") or _VISION)
    return EncoderConfig(tower, connector, normalisation(CLIP_PIXELS | dict(processor)))


def decoder(config: Json) -> DecoderConfig:
    text = config.get("text_config") or _TEXT
    return DecoderConfig.from_hf({"model_type": "qwen3"} | text, tied=config.get("tie_word_embeddings", True))


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    """The processor rounds to whole cells or, where its own settings say so, to patches: the odd ones are
    seen by their neighbours, and no token is theirs."""
    tower = pixtral_tower(config.get("vision_config") or _VISION)
    rule = pixtral_resize(processor, cell=tower.patch_size * _merge(config))
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(rule, variant=variant, resample=resample)


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return PlainFormat(tokenizer.token_id(ROW), geometry, ROW)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    names = VisualNames(
        tower_prefixes=("model.vision_encoder.",),
        connector_prefixes=("model.vision_projection.",),
        tower=pixtral_sources(config.tower.num_layers),
        connector={
            "norm.weight": Source(("norm.weight",)),
            "merge.weight": Source(("patch_merger.merging_layer.weight",), "channel_major"),
            "fc1.weight": Source(("linear_1.weight",)),
            "fc2.weight": Source(("linear_2.weight",)),
        },
        text_prefixes=("model.language_model.", "lm_head."),
    )
    return (names,)


FAMILY = Family(
    title="LightOnOCR",
    model_types=("lighton_ocr",),
    processors=("PixtralImageProcessor",),
    sizes=(
        Size("lightonai/LightOnOCR-1B-1025", "1B", "Apache-2.0"),
        Size("lightonai/LightOnOCR-2-1B", "1B", "Apache-2.0"),
    ),
    tied_default=True,
    text_type="qwen3",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    prompts=dict.fromkeys(("text", "table", "formula"), ""),  # reads whatever it is shown
    text_names=TextNames(
        prefixes=("model.language_model.",),
        others=("model.vision_encoder.", "model.vision_projection."),
    ),
)
