"""InternVL 2.5, 3 and 3.5 as transformers saves them (`internvl`) and in the original form (`internvl_chat`).

Reference: transformers' InternVL models and processor; the original form's rule and names are the same
(https://arxiv.org/abs/2404.16821).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, NormKind, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import ConfigError, DecoderConfig, TextNames
from preprocess.stage import PreprocessSpec
from preprocess.tiling import AspectGridTiling
from preprocess.types import TileGrid, Variant
from vlm.families.base import Family, Json, Size
from vlm.families.vision import ACTIVATIONS, normalisation, resample_of, square
from vlm.prompt import ImageFormat, Piece, PromptTokenizer, Rows

ORIGINAL = "internvl_chat"
ROW = "<IMG_CONTEXT>"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
_MAX_TILES = 12
_NORMS: dict[str, NormKind] = {"layer_norm": "layer", "rms_norm": "rms"}
# What InternVLVisionConfig and its original twin leave out.
_VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "attention_bias": False,
    "use_qk_norm": False,
    "use_mean_pooling": True,
}
_ORIGINAL_KEYS = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
_TEXT: dict[str, Any] = {"model_type": "qwen2"}


def _vision(config: Json) -> dict[str, Any]:
    """vision_config by the names of the newer form."""
    given = dict(config.get("vision_config") or {})
    if config.get("model_type") == ORIGINAL:
        given = {"attention_bias": True} | {_ORIGINAL_KEYS.get(key, key): v for key, v in given.items()}
        given["image_size"] = config.get("force_image_size") or given.get("image_size", 448)
    return _VISION | given


def encoder(config: Json, processor: Json) -> EncoderConfig:
    vision = _vision(config)
    layer = config.get("vision_feature_layer", config.get("select_layer", -1))
    if layer != -1 or config.get("vision_feature_select_strategy", "default") != "default":
        raise EncoderConfigError("vision_feature_layer must be -1, with the strategy 'default'")
    if vision["norm_type"] not in _NORMS or vision["hidden_act"] not in ACTIVATIONS:
        raise EncoderConfigError("vision_config: norm_type or hidden_act is not supported")
    tower = TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        intermediate=vision["intermediate_size"],
        image_size=square(vision["image_size"], "image_size"),
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=vision["layer_norm_eps"],
        norm=_NORMS[vision["norm_type"]],
        final_norm=None if vision["use_mean_pooling"] else "layer",
        qkv_bias=bool(vision["attention_bias"]),
        qk_norm=bool(vision["use_qk_norm"]),
        class_token=True,
    )
    width = decoder(config).d_model
    activation = config.get("projector_hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise EncoderConfigError(f"projector_hidden_act must be one of {', '.join(ACTIVATIONS)}")
    reduction = round(1 / float(config.get("downsample_ratio", 0.5)))
    connector = ConnectorConfig(
        "mlp", reduction, width, intermediate=width, norm="layer", activation=ACTIVATIONS[activation]
    )
    mean_std = {"image_mean": _MEAN, "image_std": _STD} | dict(processor)
    return EncoderConfig(tower, connector, normalisation(mean_std))


def decoder(config: Json) -> DecoderConfig:
    if config.get("model_type") != ORIGINAL:
        return DecoderConfig.from_hf(
            config.get("text_config") or _TEXT, tied=config.get("tie_word_embeddings", True)
        )
    text = config.get("llm_config") or _TEXT
    if text.get("model_type") == "internlm2":
        raise ConfigError("internlm2 weights are supported in the -hf form alone")
    return DecoderConfig.from_hf(text)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    """The processor tiles whatever its settings say of `crop_to_patches`; the settings of an original
    checkpoint are in its config.json."""
    rule = AspectGridTiling(
        tile_size=square(_vision(config)["image_size"], "image_size"),
        min_tiles=processor.get("min_patches", config.get("min_dynamic_patch", 1)),
        max_tiles=processor.get("max_patches", config.get("max_dynamic_patch", _MAX_TILES)),
        thumbnail=bool(config.get("use_thumbnail", True)),
    )
    resample = resample_of(processor, int(Image.Resampling.BICUBIC))
    return PreprocessSpec(rule, variant=variant, resample=resample)


@dataclass(frozen=True)
class InternVLFormat:
    """All tiles in one run between `<img>` and `</img>`, the thumbnail last."""

    row_id: int
    tokens_per_tile: int
    placeholder: str
    after: str  # text behind the image where the template writes none

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        return ("<img>", Rows(grid.num_tiles * self.tokens_per_tile, 0), "</img>" + self.after)


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    """The original form's template takes text alone: `<image>` and a line feed stand for an image in it."""
    form = ("<image>\n", "\n") if config.get("model_type") == ORIGINAL else (ROW, "")
    return InternVLFormat(tokenizer.token_id(ROW), geometry.tokens_per_tile, *form)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    return tuple(
        VisualNames(
            tower_prefixes=layout["prefixes"],
            connector_prefixes=layout["connector"],
            tower=_tower(config.tower, layout),
            connector={
                f"{ours}.{leaf}": Source((f"{theirs}.{leaf}",))
                for ours, theirs in zip(("norm", "fc1", "fc2"), layout["projector"], strict=True)
                for leaf in ("weight", "bias")
            },
            text_prefixes=("language_model.", "model.language_model.", "lm_head."),
        )
        for layout in (_SAVED, _ORIGINAL)
    )


_SAVED: Mapping[str, Any] = {
    "prefixes": ("vision_tower.", "model.vision_tower."),
    "connector": ("multi_modal_projector.", "model.multi_modal_projector."),
    "projector": ("layer_norm", "linear_1", "linear_2"),
    "patches": "embeddings.patch_embeddings.projection",
    "class": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "layer": "encoder.layer",
    "norms": ("layernorm_before", "layernorm_after"),
    "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "qk_norms": ("attention.q_norm", "attention.k_norm"),
    "out": "attention.projection_layer",
    "scales": ("lambda_1", "lambda_2"),
}
_ORIGINAL: Mapping[str, Any] = {
    "prefixes": ("vision_model.",),
    "connector": ("mlp1.",),
    "projector": ("0", "1", "3"),
    "patches": "embeddings.patch_embedding",
    "class": "embeddings.class_embedding",
    "positions": "embeddings.position_embedding",
    "layer": "encoder.layers",
    "norms": ("norm1", "norm2"),
    "qkv": ("attn.qkv",),
    "qk_norms": ("attn.q_norm", "attn.k_norm"),
    "out": "attn.proj",
    "scales": ("ls1", "ls2"),
}


def _tower(tower: TowerConfig, layout: Mapping[str, Any]) -> dict[str, Source]:
    sources = {
        f"patch_embed.proj.{leaf}": Source((f"{layout['patches']}.{leaf}",)) for leaf in ("weight", "bias")
    }
    sources |= {"cls_token": Source((layout["class"],)), "pos_embed": Source((layout["positions"],))}
    leaves = ("weight", "bias") if tower.norm == "layer" else ("weight",)
    if tower.final_norm:
        sources |= {f"norm.{leaf}": Source((f"layernorm.{leaf}",)) for leaf in ("weight", "bias")}
    for index in range(tower.num_layers):
        ours, theirs = f"blocks.{index}", f"{layout['layer']}.{index}"
        for number, norm in enumerate(layout["norms"], 1):
            sources |= {
                f"{ours}.norm{number}.{leaf}": Source((f"{theirs}.{norm}.{leaf}",)) for leaf in leaves
            }
        for leaf in ("weight", "bias"):
            if leaf == "weight" or tower.qkv_bias:
                qkv = tuple(f"{theirs}.{part}.{leaf}" for part in layout["qkv"])
                sources[f"{ours}.attn.qkv.{leaf}"] = Source(qkv)
            attention, mlp = (f"{theirs}.{scale}" for scale in layout["scales"])
            sources |= {
                f"{ours}.attn.proj.{leaf}": Source(
                    (f"{theirs}.{layout['out']}.{leaf}",), "layer_scale", attention
                ),
                f"{ours}.mlp.fc1.{leaf}": Source((f"{theirs}.mlp.fc1.{leaf}",)),
                f"{ours}.mlp.fc2.{leaf}": Source((f"{theirs}.mlp.fc2.{leaf}",), "layer_scale", mlp),
            }
        if tower.qk_norm:
            for ours_norm, norm in zip(("q_norm", "k_norm"), layout["qk_norms"], strict=True):
                sources[f"{ours}.attn.{ours_norm}.weight"] = Source((f"{theirs}.{norm}.weight",))
    return sources


_MIT, _QWEN = "MIT", "MIT (Qwen2.5: Apache-2.0)"
FAMILY = Family(
    title="InternVL 2.5, 3, 3.5",
    model_types=("internvl", ORIGINAL),
    processors=("GotOcr2ImageProcessor",),
    sizes=(
        Size("OpenGVLab/InternVL3-1B-hf", "1B", _QWEN),
        Size("OpenGVLab/InternVL3-2B-hf", "2B", _QWEN),
        Size("OpenGVLab/InternVL3-8B-hf", "8B", _QWEN),
        Size("OpenGVLab/InternVL3-14B-hf", "14B", _QWEN),
        Size("OpenGVLab/InternVL3-38B-hf", "38B", _QWEN),
        Size("OpenGVLab/InternVL3_5-1B-HF", "1B", "Apache-2.0"),
        Size("OpenGVLab/InternVL2_5-1B", "1B", _MIT),
    ),
    tied_default=True,
    text_type="qwen2",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=TextNames(
        prefixes=("model.language_model.", "language_model.model."),
        heads=("lm_head.weight", "language_model.lm_head.weight"),
        others=(
            "vision_tower.",
            "model.vision_tower.",
            "multi_modal_projector.",
            "model.multi_modal_projector.",
            "vision_model.",
            "mlp1.",
        ),
    ),
    without_processor=(ORIGINAL,),
)
