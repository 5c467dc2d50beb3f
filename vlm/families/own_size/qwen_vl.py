"""Qwen2-VL and Qwen2.5-VL: images at their own size, 2x2 patches merged, a Qwen2 decoder with M-RoPE.

Reference: transformers' Qwen2-VL and Qwen2.5-VL models and their processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import TEMPORAL_PATCH, Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from llm.rope_positions import chunked_axes
from llm.text_config import class_defaults
from preprocess.own_size import AreaResize
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, Size
from vlm.families.own_size.mrope import mrope_decoder
from vlm.families.vision import ACTIVATIONS, CLIP_PIXELS, PlainFormat, normalisation, resample_of, square
from vlm.prompt import ImageFormat, PromptTokenizer

ROW = "<|image_pad|>"
_EPS = 1e-6
_SECTIONS = (16, 24, 24)
# What the vision_config of either class leaves out.
_BOTH: dict[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": TEMPORAL_PATCH,
}
_TEXT = class_defaults("qwen2_vl_text") | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
_VISION_2 = _BOTH | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_VISION_2_5 = _BOTH | {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def tower_2(config: Json) -> TowerConfig:
    vision = checked(_VISION_2 | dict(config.get("vision_config") or {}))
    return TowerConfig(
        width=vision["embed_dim"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        intermediate=int(vision["embed_dim"] * vision["mlp_ratio"]),
        image_size=0,
        patch_size=square(vision["patch_size"], "patch_size"),
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=_EPS,
        final_norm=None,
        patch_bias=False,
        table="none",
        rope="axial",
        rope_theta=rope_theta(vision),
    )


def tower_2_5(config: Json) -> TowerConfig:
    vision = checked(_VISION_2_5 | dict(config.get("vision_config") or {}))
    patch = square(vision["patch_size"], "patch_size")
    cells = vision["window_size"] // vision["spatial_merge_size"] // patch
    if cells < 1:
        raise EncoderConfigError("vision_config: window_size must be a merged patch at least")
    return TowerConfig(
        width=vision["hidden_size"],
        num_layers=vision["depth"],
        num_heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        image_size=0,
        patch_size=patch,
        activation=ACTIVATIONS[vision["hidden_act"]],
        norm_eps=_EPS,
        norm="rms",
        final_norm=None,
        patch_bias=False,
        gated=True,
        table="none",
        rope="axial",
        rope_theta=rope_theta(vision),
        window=cells * vision["spatial_merge_size"],
        full_layers=tuple(vision["fullatt_block_indexes"]),
    )


def checked(vision: dict[str, Any]) -> dict[str, Any]:
    if vision["in_channels"] != 3 or vision["temporal_patch_size"] != TEMPORAL_PATCH:
        raise EncoderConfigError(
            f"vision_config: in_channels must be 3, temporal_patch_size {TEMPORAL_PATCH}"
        )
    if vision["hidden_act"] not in ACTIVATIONS:
        raise EncoderConfigError(f"vision_config: hidden_act must be one of {', '.join(ACTIVATIONS)}")
    return vision


def rope_theta(vision: Json) -> float:
    return float((vision.get("rope_parameters") or {}).get("rope_theta") or 10_000.0)


def merge_of(config: Json) -> int:
    """Patches merged per side."""
    return int((config.get("vision_config") or {}).get("spatial_merge_size", _BOTH["spatial_merge_size"]))


def encoder_of(tower: TowerConfig, config: Json, processor: Json) -> EncoderConfig:
    """A norm over each patch, those of a cell joined, two linears."""
    merge = merge_of(config)
    connector = ConnectorConfig(
        "mlp",
        merge,
        decoder(config).d_model,
        intermediate=tower.width * merge**2,
        norm=tower.norm,
        norm_eps=_EPS,
        norm_patches=True,
    )
    return EncoderConfig(tower, connector, normalisation(CLIP_PIXELS | dict(processor)))


def decoder(config: Json) -> DecoderConfig:
    """The decoder's keys are the outer config's own in older checkpoints. Theirs counts where the outer one
    ties nothing."""
    text = dict(config.get("text_config") or config)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return mrope_decoder(_TEXT | text, "qwen2", _SECTIONS, chunked_axes, tied=tied)


def area_rule(
    processor: Json, tower: TowerConfig, merge: int, bounds: tuple[int, int], frames: int = TEMPORAL_PATCH
) -> AreaResize:
    """bounds: pixels of the smallest and largest image where the processor is silent."""
    wanted = {"patch_size": tower.patch_size, "merge_size": merge, "temporal_patch_size": frames}
    for key, value in wanted.items():
        if processor.get(key, value) != value:
            raise EncoderConfigError(f"image processor: {key} must be {value}, as the tower's")
    if not processor.get("do_resize", True):
        raise EncoderConfigError("image processor: do_resize must be true")
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or bounds[0]
    most = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or bounds[1]
    return AreaResize(tower.patch_size * merge, int(least), int(most))


def preprocess_by(
    tower_of: Callable[[Json], TowerConfig], bounds: tuple[int, int]
) -> Callable[[Json, Json, Variant], PreprocessSpec]:
    def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
        rule = area_rule(processor, tower_of(config), merge_of(config), bounds)
        resample = resample_of(processor, int(Image.Resampling.BICUBIC))
        return PreprocessSpec(rule, variant=variant, resample=resample)

    return preprocess


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return PlainFormat(tokenizer.token_id(ROW), geometry, ROW, shaped=True)


def qwen_names(
    config: EncoderConfig,
    mlp: Mapping[str, tuple[str, ...]],
    connector: Mapping[str, Source],
) -> Sequence[VisualNames]:
    """mlp: the tensors of its fc1 and fc2. Blocks of RMS norms have no bias there."""
    tower = {"patch_embed.proj.weight": Source(("patch_embed.proj.weight",), "sum_temporal")}
    parts = {name: (name,) for name in ("norm1", "norm2", "attn.qkv", "attn.proj")} | dict(mlp)
    for block in (f"blocks.{index}." for index in range(config.tower.num_layers)):
        for ours, theirs in parts.items():
            for leaf in ("weight", "bias"):
                if leaf == "weight" or not (ours.startswith("norm") and config.tower.norm == "rms"):
                    source = Source(tuple(f"{block}{name}.{leaf}" for name in theirs))
                    tower[f"{block}{ours}.{leaf}"] = source
    names = VisualNames(
        tower_prefixes=("visual.", "model.visual."),
        connector_prefixes=("visual.", "model.visual."),
        tower=tower,
        connector=connector,
        text_prefixes=("model.", "language_model.", "lm_head."),
    )
    return (names,)


def merger_sources(config: EncoderConfig) -> dict[str, Source]:
    sources = {"norm.weight": Source(("merger.ln_q.weight",))}
    if config.tower.norm == "layer":
        sources["norm.bias"] = Source(("merger.ln_q.bias",))
    for ours, theirs in (("fc1", "merger.mlp.0"), ("fc2", "merger.mlp.2")):
        for leaf in ("weight", "bias"):
            sources[f"{ours}.{leaf}"] = Source((f"{theirs}.{leaf}",))
    return sources


def names_2(config: EncoderConfig) -> Sequence[VisualNames]:
    mlp = {"mlp.fc1": ("mlp.fc1",), "mlp.fc2": ("mlp.fc2",)}
    return qwen_names(config, mlp, merger_sources(config))


def names_2_5(config: EncoderConfig) -> Sequence[VisualNames]:
    mlp = {"mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc2": ("mlp.down_proj",)}
    return qwen_names(config, mlp, merger_sources(config))


TEXT_NAMES = TextNames(prefixes=("model.language_model.", "model."), others=("visual.", "model.visual."))
_BOUNDS = (56 * 56, 28 * 28 * 1280)
_QWEN = "Apache-2.0"

QWEN2_VL = Family(
    title="Qwen2-VL",
    model_types=("qwen2_vl",),
    processors=("Qwen2VLImageProcessor",),
    sizes=(
        Size("Qwen/Qwen2-VL-2B-Instruct", "2B", _QWEN),
        Size("Qwen/Qwen2-VL-7B-Instruct", "7B", _QWEN),
        Size("opendatalab/MinerU2.5-2509-1.2B", "1.2B", "AGPL-3.0"),
    ),
    tied_default=None,
    text_type="qwen2_vl_text",
    encoder=lambda config, processor: encoder_of(tower_2(config), config, processor),
    decoder=decoder,
    preprocess=preprocess_by(tower_2, _BOUNDS),
    image_format=image_format,
    visual_names=names_2,
    text_names=TEXT_NAMES,
)
QWEN2_5_VL = Family(
    title="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    processors=("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
    sizes=(
        Size("Qwen/Qwen2.5-VL-3B-Instruct", "3B", "Qwen Research"),
        Size("Qwen/Qwen2.5-VL-7B-Instruct", "7B", _QWEN),
        Size("allenai/olmOCR-2-7B-1025", "7B", _QWEN),
        Size("nanonets/Nanonets-OCR2-3B", "3B", "none stated; Qwen2.5-VL-3B: Qwen Research"),
    ),
    tied_default=None,
    text_type="qwen2_5_vl_text",
    encoder=lambda config, processor: encoder_of(tower_2_5(config), config, processor),
    decoder=decoder,
    preprocess=preprocess_by(tower_2_5, _BOUNDS),
    image_format=image_format,
    visual_names=names_2_5,
    text_names=TEXT_NAMES,
)
