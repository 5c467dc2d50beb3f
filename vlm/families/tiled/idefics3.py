"""SmolVLM, SmolVLM2 and Idefics3, and the document models derived from them (Granite-Docling, SmolDocling).

Reference: transformers' Idefics3 and SmolVLM models and processors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError
from encoder.geometry import VisionGeometry
from encoder.tensor_names import Source, VisualNames
from llm.decoder_config import DecoderConfig, TextNames
from preprocess.stage import PreprocessSpec
from preprocess.tiling import Idefics3Tiling
from preprocess.types import TileGrid, Variant
from vlm.families.base import Family, Json, Size
from vlm.families.vision import normalisation, resample_of, siglip_sources, siglip_tower
from vlm.prompt import ImageFormat, Piece, PromptTokenizer, Rows

PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
PLACEHOLDER = "<image>"
_BORDER = "<fake_token_around_image>"
# Special tokens that a prompt is framed with, and an answer never holds.
_FRAME = re.compile(
    r"<\|.*\|>|<image>|<fake_token_around_image>|<global-img>|<row_\d+_col_\d+>|"
    r"<end_of_utterance>|</?s>|<(unk|pad)>"
)
_TILE_SIZE = 364  # pixels, where the processor is silent
_TEXT_WIDTH = 4096  # default hidden_size of the Llama, Mistral, Qwen2 and Qwen3 configurations
# Checkpoints leave out what equals their family's default: SmolVLMVisionConfig, Idefics3VisionConfig.
_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def encoder(config: Json, processor: Json) -> EncoderConfig:
    text = config.get("text_config") or {}
    connector = ConnectorConfig(
        "pixel_shuffle", config.get("scale_factor", 2), text.get("hidden_size", _TEXT_WIDTH)
    )
    tower = siglip_tower(_VISION | dict(config.get("vision_config") or {}))
    return EncoderConfig(tower, connector, normalisation(processor))


def decoder(config: Json) -> DecoderConfig:
    """A Llama where text_config is absent; the outer flag alone says whether the head is tied."""
    text = config.get("text_config")
    if text is None:
        text = {"rms_norm_eps": 1e-5}
    return DecoderConfig.from_hf({"model_type": "llama"} | text, tied=bool(config.get("tie_word_embeddings")))


def tiling(processor: Json) -> Idefics3Tiling:
    if not processor.get("do_resize", True):
        raise EncoderConfigError("image processor: do_resize must be true")
    return Idefics3Tiling(
        tile_size=_edge(processor, "max_image_size", _TILE_SIZE),
        longest_edge=_edge(processor, "size", 4 * _TILE_SIZE),
        split=bool(processor.get("do_image_splitting", True)),
    )


def preprocess(config: Json, processor: Json, variant: Variant) -> PreprocessSpec:
    resample = resample_of(processor, int(Image.Resampling.LANCZOS))
    return PreprocessSpec(tiling(processor), variant=variant, resample=resample)


def image_format(config: Json, tokenizer: PromptTokenizer, geometry: VisionGeometry) -> ImageFormat:
    return Idefics3Format(tokenizer.token_id(PLACEHOLDER), geometry.tokens_per_tile)


def markup(specials: Collection[str]) -> Collection[str]:
    """DocTags, where the vocabulary has them: whatever isn't of the chat's or an image's frame."""
    return [token for token in specials if not _FRAME.fullmatch(token)] if "<doctag>" in specials else ()


def visual_names(config: EncoderConfig) -> Sequence[VisualNames]:
    positions = Source(("embeddings.position_embedding.weight",), "bucketed_positions")
    names = VisualNames(
        tower_prefixes=("model.vision_model.",),
        connector_prefixes=("model.connector.",),
        tower=siglip_sources(config.tower.num_layers) | {"pos_embed": positions},
        connector={"proj.weight": Source(("modality_projection.proj.weight",))},
        text_prefixes=("model.text_model.", "lm_head."),
    )
    return (names,)


@dataclass(frozen=True)
class Idefics3Format:
    """Row/column markers around each tile, a global tile last; a single tile has no markers.

    Source: the SmolVLM and Idefics3 processors' `get_image_prompt_string`.
    """

    row_id: int
    tokens_per_tile: int
    placeholder: str = PLACEHOLDER

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        pieces: list[Piece] = []
        tiles = itertools.count(0, self.tokens_per_tile)
        for row in range(grid.rows):
            for col in range(grid.cols):
                pieces += (f"{_BORDER}<row_{row + 1}_col_{col + 1}>", Rows(self.tokens_per_tile, next(tiles)))
            pieces.append("\n")
        newline = "\n" if grid.rows else ""
        pieces += (f"{newline}{_BORDER}<global-img>", Rows(self.tokens_per_tile, next(tiles)), _BORDER)
        return pieces


def _edge(section: Json, key: str, default: int) -> int:
    value = section.get(key)
    if value is None:
        return default
    edge = value.get("longest_edge") if isinstance(value, dict) else None
    if isinstance(edge, bool) or not isinstance(edge, int):
        raise EncoderConfigError(f"image processor: {key} must be an object with an integer longest_edge")
    return edge


FAMILY = Family(
    title="SmolVLM, SmolVLM2, Idefics3, Granite-Docling, SmolDocling",
    model_types=("smolvlm", "idefics3"),
    processors=PROCESSORS,
    sizes=(
        Size("HuggingFaceTB/SmolVLM-256M-Instruct", "256M", "Apache-2.0"),
        Size("HuggingFaceTB/SmolVLM-500M-Instruct", "500M", "Apache-2.0"),
        Size("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "2.2B", "Apache-2.0"),
        Size("ibm-granite/granite-docling-258M", "258M", "Apache-2.0"),
        Size("ds4sd/SmolDocling-256M-preview", "256M", "CDLA-Permissive-2.0"),
        Size("HuggingFaceM4/Idefics3-8B-Llama3", "8B", "Apache-2.0"),
    ),
    tied_default=False,
    text_type="llama",
    encoder=encoder,
    decoder=decoder,
    preprocess=preprocess,
    image_format=image_format,
    visual_names=visual_names,
    markup=markup,
    text_names=TextNames(prefixes=("model.text_model.",), others=("model.vision_model.", "model.connector.")),
)
