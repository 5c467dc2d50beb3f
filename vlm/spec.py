"""What the serving side knows of a model without its weights: prompts, tiling, costs. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from encoder.encoder_config import Arithmetic
from encoder.geometry import VisionGeometry
from encoder.revision import open_clip_revision, with_arithmetic
from llm.cost import DecoderShape, kv_bytes, kv_element_bytes
from llm.decoder_config import DecoderConfig
from llm.request import VisualKey
from llm.storage import KvStorage
from llm.text.tokenizer import Tokenizer
from preprocess.anyres import among
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.tiling import AspectGridTiling
from preprocess.types import Detail, TileGrid, TilingRule, Variant
from vlm.checkpoint import Checkpoint
from vlm.config import CPU_PIXELS
from vlm.families.base import Family
from vlm.families.vision import PlainFormat
from vlm.hub import Files
from vlm.model_source import OPEN_CLIP_SEED, ModelSource, naming
from vlm.prompt import ImageFormat, PromptBuilder

_KEY_VERSION = "visual-1"
BLOCK_SIZE = 16  # positions of a KV block
OPEN_CLIP_IMAGE_ID = 0  # any id: visual tokens take its place


@dataclass(frozen=True)
class ModelSpec:
    name: str  # as clients see it
    source: ModelSource
    family: Family | None  # None: the articles' form, a tower of open_clip's beside a plain decoder
    decoder: DecoderConfig
    shape: DecoderShape
    geometry: VisionGeometry
    tokenizer: Tokenizer
    preprocess: PreprocessSpec
    checkpoint: Checkpoint
    kv: KvStorage = "float32"  # how the engine stores its cache
    arithmetic: Arithmetic = "float32"  # of the tower's products
    _specs: dict[tuple[Detail, TilingRule], PreprocessSpec] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        variant: Variant = "fast",
        kv: KvStorage = "float32",
        files: Files = "all",
        max_pixels: int = CPU_PIXELS,
        arithmetic: Arithmetic = "float32",
    ) -> ModelSpec:
        """Reads a checkpoint's JSON files; `files`: how much of it has to be here; `max_pixels`: of an image
        that is taken whole, beside the checkpoint's own cap.

        Raises ConfigError, with the directory, where it isn't a checkpoint of a known family.
        """
        source = ModelSource.parse(model, files)
        with naming(source.directory):
            spec = replace(cls._read(source, variant, kv, max_pixels), arithmetic=arithmetic)
        if files == "all":
            _ = spec.revision  # damaged weights are reported before there is work
        return spec

    @classmethod
    def _read(cls, source: ModelSource, variant: Variant, kv: KvStorage, max_pixels: int) -> ModelSpec:
        checkpoint = Checkpoint.read(source.directory)
        if source.tower:
            family = None
            encoder = source.open_clip_config(checkpoint.decoder.d_model)
            preprocess = PreprocessSpec(AspectGridTiling(encoder.tower.image_size), variant=variant)
        else:
            family, encoder = checkpoint.family, checkpoint.encoder
            preprocess = checkpoint.preprocess(variant, max_pixels)
        return cls(
            name=source.name,
            source=source,
            family=family,
            decoder=checkpoint.decoder,
            shape=checkpoint.shape,
            geometry=encoder.geometry,
            tokenizer=checkpoint.tokenizer,
            preprocess=preprocess,
            checkpoint=checkpoint,
            kv=kv,
        )

    @cached_property
    def revision(self) -> str:
        """64 hex digits of what visual tokens depend on besides the tiles; reads the vision weights."""
        source = self.source
        with naming(source.directory):
            if not source.tower:
                revision = self.checkpoint.revision
            else:
                revision = open_clip_revision(
                    source.open_clip_config(self.decoder.d_model),
                    source.tower,
                    source.tower_file,
                    source.connector_file,
                    OPEN_CLIP_SEED,
                )
        return with_arithmetic(revision, self.arithmetic)

    @property
    def directory(self) -> Path:
        return self.source.directory

    @property
    def context_length(self) -> int:
        return self.decoder.max_positions

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    def preprocess_spec(self, detail: Detail, num_images: int = 1) -> PreprocessSpec:
        """Of an image in a chat that has so many."""
        rule = among(self.preprocess.rule, num_images)
        if (detail, rule) not in self._specs:
            self._specs[detail, rule] = replace(self.preprocess, rule=rule, detail=detail)
        return self._specs[detail, rule]

    def visual_key(self, digest: str, spec: PreprocessSpec, namespace: str = "") -> VisualKey:
        """Names visual tokens by the image's bytes, how they are tiled and what encodes them; a namespace
        has its own, so that no caller can time whether another one sent the image."""
        fields = (_KEY_VERSION, tiles_key(digest, spec), self.revision, *filter(None, (namespace,)))
        encoded = b"".join(len(f).to_bytes(8, "big") + f.encode() for f in fields)
        return VisualKey(hashlib.sha256(encoded).hexdigest())

    @cached_property
    def image_format(self) -> ImageFormat:
        if self.family is None:
            return PlainFormat(OPEN_CLIP_IMAGE_ID, self.geometry)
        return self.family.image_format(self.checkpoint.config, self.tokenizer, self.geometry)

    @cached_property
    def prompt_builder(self) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.image_format, flat=bool(self.source.tower))

    def image_prompt_tokens(self, grid: TileGrid) -> int:
        """Prompt tokens that one more image of this grid adds, markers included."""
        return self.prompt_builder.image_tokens(grid)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV cache of a sequence of this length, whole blocks, as the engine stores it."""
        element_bytes = kv_element_bytes(self.kv, self.shape.head_dim)
        return int(kv_bytes(self.shape, num_tokens, element_bytes, block_size=BLOCK_SIZE))
