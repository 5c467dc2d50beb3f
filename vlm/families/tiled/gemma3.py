"""Gemma 3 (4B, 12B, 27B): a SigLIP tower, 4x4 average pooling, and image spans that see themselves whole.

Reference: transformers' Gemma 3 models and processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from preprocess.stage import PreprocessSpec
from preprocess.tiling import SquashTiling
from preprocess.types import TileGrid, Variant
from vlm.families.base import Family, Json, Size
from vlm.families.vision import normalisation, resample_of, siglip_sources, siglip_tower
from vlm.prompt import ImageFormat, Piece, PromptTokenizer, Rows

# What SiglipVisionConfig and Gemma3Config leave out.
_VISION: dict[str, Any] = {
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
_TOKENS_PER_IMAGE = 256
_TEXT: dict[str, Any] = {"model_type": "gemma3_text"}
_LICENCE = "Gemma Terms of Use"


def encoder(config: Json, processor: Json) -> EncoderConfig:
    tower = siglip_tower(_VISION | dict(config.get("vision_config") or {}))
    side = tower.image_size // tower.patch_size
    pooled = round((config.get("mm_tokens_per_image") or _TOKENS_PER_IMAGE) ** 0.5)
    if side % pooled:
        raise EncoderConfigError(
            f"mm_tokens_per_image: {pooled}x{pooled} doesn't divide {side}x{side} patches"
        )
    connector = ConnectorConfig(
        "average_pool",
        side // pooled,
        decoder(config).d_model,
        norm="rms",
        norm_eps=tower.norm_eps,
        bias=False,
    )
    return EncoderConfig(tower, connector, normalisation(processor))


def decoder(config: Json) -> DecoderConfig:
    text = _TEXT | dict(config.get("text_config") or {})
    return replace(DecoderConfig.from_hf(text, tied=config.get("tie_word_embeddings")), whole_spans=True)


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    """Crops are for detail "high", with the processor's own constants: whatever its settings say of them, it
    makes none unless it is asked, and then by these."""
    size = _VISION | dict(config.get("vision_config") or {})
    rule = SquashTiling(size["image_size"])
    resample = resample_of(processor, int(Image.Resampling.BILINEAR))
    return PreprocessSpec(rule, variant=variant, resample=resample)


@dataclass(frozen=True)
class Gemma3Format:
    """256 tokens between markers and empty lines; crops follow the whole image, in the processor's words.

    Line feeds merge with those of the text around: runs of them are tokens of their own.
    """

    row_id: int
    tokens_per_tile: int
    placeholder: str = "<start_of_image>"

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        num_crops = grid.num_tiles - 1
        whole = self._tile(num_crops)  # stored last
        if not num_crops:
            return whole
        pieces = ["Here is the original image ", *whole]
        pieces.append(" and here are some crops to help you see better ")
        for crop in range(num_crops):
            pieces += [*([" "] if crop else []), *self._tile(crop)]
        return pieces

    def _tile(self, number: int) -> list[Piece]:
        rows = Rows(self.tokens_per_tile, number * self.tokens_per_tile)
        return [f"\n\n{self.placeholder}", rows, "<end_of_image>\n\n"]


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return Gemma3Format(tokenizer.token_id("<image_soft_token>"), geometry.tokens_per_tile)


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    positions = Source(("embeddings.position_embedding.weight",), "positions")
    return (
        VisualNames(
            tower_prefixes=(
                "vision_tower.vision_model.",
                "model.vision_tower.vision_model.",
                "vision_tower.",
                "model.vision_tower.",
            ),
            connector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
            tower=siglip_sources(config.tower.num_layers) | {"pos_embed": positions},
            connector={
                "norm.weight": Source(("mm_soft_emb_norm.weight",), "plus_one"),
                "proj.weight": Source(("mm_input_projection_weight",), "transpose"),
            },
            text_prefixes=("language_model.", "model.language_model.", "lm_head."),
        ),
    )


FAMILY = Family(
    title="Gemma 3",
    model_types=("gemma3",),
    processors=("Gemma3ImageProcessor",),
    sizes=(
        Size("google/gemma-3-4b-it", "4B", _LICENCE),
        Size("google/gemma-3-12b-it", "12B", _LICENCE),
        Size("google/gemma-3-27b-it", "27B", _LICENCE),
    ),
    tied_default=True,
    text_type="gemma3_text",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    text_names=TextNames(
        prefixes=("language_model.model.", "model.language_model."),
        heads=("language_model.lm_head.weight", "lm_head.weight"),
        others=(
            "vision_tower.",
            "model.vision_tower.",
            "multi_modal_projector.",
            "model.multi_modal_projector.",
        ),
    ),
)
