"""What a family of checkpoints is: how its files become the configurations of the mechanisms below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from encoder.encoder_config import EncoderConfig
from encoder.geometry import VisionGeometry
from encoder.tensor_names import VisualNames
from llm.decoder_config import ConfigError, DecoderConfig, TextNames
from llm.text.tokenizer import Markup
from preprocess.stage import PreprocessSpec
from preprocess.types import Variant
from vlm.prompt import ImageFormat, PromptTokenizer

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """One published checkpoint of a family."""

    repo: str  # its id on the hub
    params: str  # as its card says: "256M"
    licence: str  # SPDX, or the name its card gives


@dataclass(frozen=True)
class Family:
    """Functions of a checkpoint's JSON files. `config` is config.json, `processor` the image processor's
    settings. All raise ConfigError, EncoderConfigError or ValueError where the checkpoint asks for something
    the mechanisms don't do; their texts name the field.
    """

    title: str
    model_types: tuple[str, ...]
    processors: tuple[str, ...]  # names of its image processor, without Fast and Pil
    sizes: tuple[Size, ...]
    text_type: str  # model_type of the decoder's part where the config is silent
    tied_default: bool | None  # the head's tie where the outer config is silent; None: its text part says
    encoder: Callable[[Json, Json], EncoderConfig]
    decoder: Callable[[Json], DecoderConfig]
    preprocess: Callable[[Json, Json, Variant], PreprocessSpec]
    image_format: Callable[[Json, PromptTokenizer, VisionGeometry], ImageFormat]
    visual_names: Callable[[EncoderConfig], Sequence[VisualNames]]  # layouts, the first that fits is taken
    text_names: TextNames
    markup: Markup = lambda specials: ()  # special tokens that its answers are written with
    split: Callable[[Json], str] = lambda config: ""  # pattern of words where tokenizer.json has a wrong one
    without_processor: tuple[str, ...] = ()  # model types whose config.json holds the processor's settings
    prompts: Mapping[str, str] = field(default_factory=dict)  # of captioning's presets, as it was taught
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the model types they may have

    def claims(self, config: Json) -> bool:
        """Whether a config of one of its model types has the parts that this family reads."""
        given = {part: (config.get(part) or {}).get("model_type") for part in self.parts}
        return all(given[part] in (None, *kinds) for part, kinds in self.parts.items())


def image_processor(files: Mapping[str, Json | None], types: tuple[str, ...]) -> Json:
    """The image processor's settings out of `processor_config.json` or `preprocessor_config.json`.

    Raises ConfigError where there are none, or they are another processor's.
    """
    nested = (files.get("processor_config.json") or {}).get("image_processor")
    section = nested if nested is not None else files.get("preprocessor_config.json")
    if section is None:
        raise ConfigError("the checkpoint has no processor_config.json or preprocessor_config.json")
    if not isinstance(section, Mapping):
        raise ConfigError("image_processor must be an object")
    kind = str(section.get("image_processor_type", types[0]))
    if kind.removesuffix("Fast").removesuffix("Pil") not in types:
        raise ConfigError(f"image_processor_type must be one of {', '.join(types)}")
    return section
