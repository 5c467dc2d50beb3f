"""What decoders share whose images have rows and columns for rope (M-RoPE), and their towers' inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llm.decoder_config import ConfigError, DecoderConfig
from llm.rope_positions import TIME
from vlm.families.base import Json


def mrope_decoder(
    text: Json,
    architecture: str,
    sections: Sequence[int],
    axes_of: Callable[[Sequence[int]], tuple[int, ...]],
    *,
    tied: bool,
) -> DecoderConfig:
    """Of a decoder part whose left-out keys are filled in; `sections` where it names none. ConfigError."""
    rope: dict[str, Any] = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    sections = rope.pop("mrope_section", None) or sections
    rope.pop("mrope_interleaved", None)
    for key in ("rope_type", "type"):
        if rope.get(key) == "mrope":
            rope[key] = "default"
    values = {**text, "model_type": architecture, "rope_scaling": rope or None, "rope_parameters": None}
    config = DecoderConfig.from_hf(values, tied=tied)
    turning, still = config.ropes[0].dim // 2, config.ropes[0].still
    if len(sections) != 3 or sum(sections) != turning:
        raise ConfigError(f"mrope_section must be three numbers that sum to {turning}, half of what turns")
    return replace(config, rope_axes=axes_of(sections) + (TIME,) * still)
