"""LLaVA-NeXT (LLaVA 1.6), and Granite Vision 3, which has its shape with SigLIP and a Granite decoder.

Reference: transformers' LLaVA-NeXT and Granite models and processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.packing import Packing
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from preprocess.anyres import AnyResTiling
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.vision import (
    ACTIVATIONS,
    CLIP_PIXELS,
    PlainFormat,
    normalisation,
    resample_of,
    siglip_sources,
    siglip_tower,
)
from vlm.prompt import ImageFormat, PromptTokenizer

ROW = "<image>"
CLIP = "clip_vision_model"
_CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_LAYER = -2  # whose output is read: the last but one
_MOST_LAYERS = 64  # of a tower on disk; those behind the one that is read are skipped
_NEWLINE = "image_newline"
# LlavaNextConfig's tower, and what CLIPVisionConfig and SiglipVisionConfig leave out.
_WHOLE: dict[str, Any] = {
    "model_type": CLIP,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def tower(config: Json) -> TowerConfig:
    return tower_of(config, _WHOLE, "default", _LAYER)


def tower_of(config: Json, default: Json, strategy: str, layer: int) -> TowerConfig:
    """`default`: the tower of a config without any; strategy and layer where the config is silent."""
    given = config.get("vision_config")
    vision = dict(default) if given is None else {"model_type": default["model_type"], **given}
    is_clip = vision["model_type"] == CLIP
    whole = siglip_tower((_CLIP if is_clip else _SIGLIP) | vision)
    strategy = config.get("vision_feature_select_strategy", strategy)
    if strategy != ("default" if is_clip else "full"):
        raise EncoderConfigError(
            "vision_feature_select_strategy must be 'default' with a CLIP tower, 'full' with SigLIP"
        )
    layers = _layers(config.get("vision_feature_layer", layer), whole.num_layers)
    used = replace(
        whole,
        num_layers=max(layers) + 1,
        final_norm=None,
        joined_layers=layers if len(layers) > 1 else (),
    )
    return replace(used, class_token=True, patch_bias=False, first_norm="layer") if is_clip else used


def _layers(given: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Indexes of blocks, of what transformers numbers from the embeddings on or from the end."""
    numbers = [given] if isinstance(given, int) else list(given)
    blocks = tuple(number - 1 if number > 0 else num_layers + number for number in numbers)
    if not blocks or 0 in numbers or not all(0 <= block < num_layers for block in blocks):
        raise EncoderConfigError(f"vision_feature_layer must name blocks of the tower's {num_layers}")
    return blocks


def encoder(config: Json, processor: Json) -> EncoderConfig:
    return encoder_of(tower(config), decoder(config), Packing(), config, processor)


def encoder_of(
    vision: TowerConfig, text: DecoderConfig, packing: Packing, config: Json, processor: Json
) -> EncoderConfig:
    activation = config.get("projector_hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise EncoderConfigError(f"projector_hidden_act must be one of {', '.join(ACTIVATIONS)}")
    connector = ConnectorConfig(
        "mlp",
        1,
        text.d_model,
        intermediate=text.d_model,
        activation=ACTIVATIONS[activation],
        bias=bool(config.get("multimodal_projector_bias", True)),
        output_scale=text.embedding_scale,  # Granite's is on visual tokens too
    )
    pixels = normalisation(CLIP_PIXELS | dict(processor))
    return EncoderConfig(vision, connector, pixels, packing=packing)


def decoder(config: Json) -> DecoderConfig:
    text = {"model_type": "llama"} | dict(config.get("text_config") or {})
    return DecoderConfig.from_hf(text, tied=bool(config.get("tie_word_embeddings")))


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    canvases = canvases_of(config, processor, tower(config).image_size) or _CANVASES
    rule = AnyResTiling(tower(config).image_size, canvases)
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(rule, variant=variant, resample=resample)


def canvases_of(config: Json, processor: Json, tile: int) -> tuple[tuple[int, int], ...]:
    """Empty where neither names any. Raises EncoderConfigError where they or the tile's size disagree."""
    size, crop = (processor.get(key) or {} for key in ("size", "crop_size"))
    sides = {*size.values(), *(crop.values() if processor.get("do_center_crop", True) else ())}
    if sides - {tile}:
        raise EncoderConfigError(f"image processor: size and crop_size must be the tower's {tile}")
    given = [source.get("image_grid_pinpoints") for source in (processor, config)]
    canvases = {tuple(map(tuple, canvas)) for canvas in given if canvas}
    if len(canvases) > 1:
        raise EncoderConfigError("image_grid_pinpoints must be the same in config and image processor")
    return next(iter(canvases), ())


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return PlainFormat(tokenizer.token_id(ROW), geometry, ROW)


def tower_sources(config: TowerConfig) -> dict[str, Source]:
    """As SigLIP's, and CLIP's, which has a class token and a norm in front of its blocks."""
    sources = siglip_sources(config.num_layers)
    sources |= {"pos_embed": Source(("embeddings.position_embedding.weight",), "positions")}
    for leaf in ("weight", "bias"):
        del sources[f"norm.{leaf}"]
        if config.first_norm:
            sources[f"first_norm.{leaf}"] = Source((f"pre_layrnorm.{leaf}",))
    if config.class_token:
        sources["cls_token"] = Source(("embeddings.class_embedding",), "class_token")
        del sources["patch_embed.proj.bias"]
    return sources


def connector_sources(has_bias: bool) -> dict[str, Source]:
    sources = {}
    for leaf in ("weight", "bias") if has_bias else ("weight",):
        sources[f"main.fc1.{leaf}"] = Source((f"linear_1.{leaf}",))
        sources[f"main.fc2.{leaf}"] = Source((f"linear_2.{leaf}",), "output_scale")
    return sources


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    behind = (f"encoder.layers.{index}." for index in range(config.tower.num_layers, _MOST_LAYERS))
    return (
        VisualNames(
            tower_prefixes=(
                "vision_tower.vision_model.",
                "model.vision_tower.vision_model.",
                "vision_tower.",
                "model.vision_tower.",
            ),
            connector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
            tower=tower_sources(config.tower),
            connector=connector_sources(config.connector.bias),
            beside={"newline": Source((_NEWLINE,), "output_scale")},
            beside_prefixes=("", "model."),
            text_prefixes=("language_model.", "model.language_model.", "lm_head."),
            unused=("post_layernorm.", "head.", "embeddings.position_ids", *behind),
        ),
    )


TEXT_NAMES = TextNames(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    others=(
        "vision_tower.",
        "model.vision_tower.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
        _NEWLINE,
        f"model.{_NEWLINE}",
    ),
)

FAMILY = Family(
    title="LLaVA-NeXT, Granite Vision 3",
    model_types=("llava_next",),
    processors=("LlavaNextImageProcessor",),
    sizes=(
        Size("ibm-granite/granite-vision-3.3-2b", "2B", "Apache-2.0"),
        Size("llava-hf/llava-v1.6-mistral-7b-hf", "7B", "Apache-2.0"),
        Size("llava-hf/llava-v1.6-vicuna-7b-hf", "7B", "Llama 2 Community"),
    ),
    tied_default=False,
    text_type="llama",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=TEXT_NAMES,
)
