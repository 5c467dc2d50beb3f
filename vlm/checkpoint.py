"""A checkpoint directory as its family reads it: JSON files only, no tensor, no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from encoder.encoder_config import EncoderConfig
from encoder.revision import encoder_revision
from encoder.tensor_files import read_index
from encoder.tensor_names import VisualNames, layout_of
from llm.cost import DecoderShape
from llm.decoder_config import ConfigError, DecoderConfig, TextNames, read_json_object
from llm.text.tokenizer import Tokenizer
from preprocess.own_size import capped
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.families.base import Family, Json, image_processor
from vlm.families.registry import family_of, find_family

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """Configurations are read when they are first asked for; each raises ConfigError, EncoderConfigError or
    ValueError, without a path, where the checkpoint can't be used."""

    directory: Path
    config: dict[str, Any]  # of config.json

    @classmethod
    def read(cls, directory: Path | str) -> Checkpoint:
        """Raises ConfigError where config.json is missing or not a JSON object."""
        directory = Path(directory)
        return cls(directory, read_json_object(directory / "config.json"))

    @cached_property
    def family(self) -> Family:
        return family_of(self.config)

    @cached_property
    def processor(self) -> Json:
        """The image processor's settings."""
        if self.config.get("model_type") in self.family.without_processor:
            return {}
        files = {
            name: read_json_object(self.directory / name)
            for name in _PROCESSOR_FILES
            if (self.directory / name).is_file()
        }
        return image_processor(files, self.family.processors)

    @cached_property
    def encoder(self) -> EncoderConfig:
        return self.family.encoder(self.config, self.processor)

    @cached_property
    def decoder(self) -> DecoderConfig:
        """Of a family's model, or of a plain decoder, which is its own family."""
        family = find_family(self.config)
        return DecoderConfig.from_hf(self.config) if family is None else family.decoder(self.config)

    @cached_property
    def shape(self) -> DecoderShape:
        """What the decoder's bytes and FLOPs follow from; of any config, known or not. Raises CostError.

        Of a decoder that this engine runs, as it holds the KV cache.
        """
        family = find_family(self.config)
        told: dict[str, Any] = (
            {} if family is None else {"tied_default": family.tied_default, "text_type": family.text_type}
        )
        shape = DecoderShape.from_config(self.config, **told)
        with suppress(ConfigError):
            shape = replace(shape, keeps_all=any(self.decoder.windows))
        return shape

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """With the markup that its family's answers hold."""
        family = find_family(self.config)
        if family is None:
            return Tokenizer.from_directory(self.directory)
        return Tokenizer.from_directory(self.directory, family.markup, family.split(self.config))

    @property
    def text_names(self) -> TextNames:
        family = find_family(self.config)
        return TextNames() if family is None else family.text_names

    @cached_property
    def visual_names(self) -> VisualNames:
        """Where this checkpoint keeps the encoder's tensors. Raises CheckpointError where it holds none."""
        return layout_of(self.family.visual_names(self.encoder), read_index(self.directory))

    def preprocess(self, variant: Variant = "fast", max_pixels: int = 0) -> PreprocessSpec:
        """`max_pixels`: of an image that is taken whole, beside the checkpoint's own cap; 0: that alone."""
        spec = self.family.preprocess(self.config, self.processor, variant)
        return replace(spec, rule=capped(spec.rule, max_pixels)) if max_pixels else spec

    @cached_property
    def revision(self) -> str:
        """64 hex digits of what visual tokens depend on besides the tiles; reads the vision weights."""
        return encoder_revision(self.directory, self.encoder, self.visual_names)


__all__ = ["Checkpoint", "ConfigError"]
