"""What the serving side knows of a model without its weights: prompts, tiling, costs. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from encoder.config import EncoderConfig
from encoder.geometry import VisionGeometry
from encoder.revision import encoder_revision
from llm.config import ConfigError, DecoderConfig, read_json_object
from llm.cost import DecoderShape, kv_bytes
from llm.request import VisualKey
from llm.tokenizer import Tokenizer
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.types import Detail, TileGrid, Variant
from vlm.config import DEFAULT_MODEL
from vlm.prompt import Idefics3Format, PromptBuilder

_KEY_VERSION = "visual-1"
BLOCK_SIZE = 16  # positions of a KV block


@dataclass(frozen=True)
class ModelSpec:
    name: str  # as clients see it
    directory: Path
    decoder: DecoderConfig
    shape: DecoderShape
    geometry: VisionGeometry
    tokenizer: Tokenizer
    preprocess: PreprocessSpec
    revision: str  # of the encoder, 64 hex digits
    _specs: dict[Detail, PreprocessSpec] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, model: str | Path, *, variant: Variant = "fast") -> ModelSpec:
        """Reads a checkpoint directory's JSON files and hashes its vision weights.

        Raises ConfigError (or the package's own ValueError) where it isn't a checkpoint of a known family.
        """
        directory = Path(DEFAULT_MODEL if model == "default" else model)
        if not directory.is_dir():
            raise ConfigError(
                f"{model} is not a folder; give a Hugging Face checkpoint directory of the SmolVLM or "
                "Idefics3 family, or 'default'"
            )
        config = read_json_object(directory / "config.json")
        return cls(
            name="vlm-default" if directory.samefile(DEFAULT_MODEL) else directory.resolve().name,
            directory=directory,
            decoder=DecoderConfig.from_hf(config),
            shape=DecoderShape.from_config(config),
            geometry=EncoderConfig.from_directory(directory).geometry,
            tokenizer=Tokenizer.from_directory(directory),
            preprocess=PreprocessSpec.from_processor_config(_processor_config(directory), variant=variant),
            revision=encoder_revision(directory),
        )

    @property
    def context_length(self) -> int:
        return self.decoder.max_positions

    def preprocess_spec(self, detail: Detail) -> PreprocessSpec:
        if detail not in self._specs:
            base = self.preprocess
            self._specs[detail] = PreprocessSpec(
                base.rule, detail, base.variant, base.background, base.resample
            )
        return self._specs[detail]

    def visual_key(self, digest: str, spec: PreprocessSpec) -> VisualKey:
        """Names visual tokens by the image's bytes, how they are tiled and what encodes them."""
        fields = (_KEY_VERSION, tiles_key(digest, spec), self.revision)
        encoded = b"".join(len(f).to_bytes(8, "big") + f.encode() for f in fields)
        return VisualKey(hashlib.sha256(encoded).hexdigest())

    @cached_property
    def image_format(self) -> Idefics3Format:
        return Idefics3Format(self.tokenizer, self.geometry.tokens_per_tile)

    @cached_property
    def prompt_builder(self) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.image_format)

    def image_prompt_tokens(self, grid: TileGrid) -> int:
        """Prompt tokens that one more image of this grid adds, markers included."""
        return len(self.image_format.run(grid).token_ids)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV cache of a sequence of this length, whole blocks, in the cache's default 32 bits."""
        return int(kv_bytes(self.shape, num_tokens, element_bytes=4, block_size=BLOCK_SIZE))


def _processor_config(directory: Path) -> dict[str, Any]:
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (directory / name).exists():
            config = read_json_object(directory / name)
            if name != "processor_config.json" or "image_processor" in config:
                return config
    raise ConfigError("the checkpoint has no processor_config.json or preprocessor_config.json")
