"""Which type the vision tower multiplies in on this machine. Torch-free: it is part of visual keys."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

from encoder.encoder_config import Arithmetic
from llm.backend.native_build import cpu_flags
from vlm.checkpoint import Checkpoint
from vlm.config import EngineOptions
from vlm.model_source import ModelSource, naming

WORTH_FLOPS = 1e9
"""Of a tile, from which on bfloat16 is worth its conversions. Tiles go through such towers one by one."""


def fast_arithmetic() -> Arithmetic:
    """bfloat16 where this CPU multiplies it natively, several times as fast as float32; VLM_ENCODER_DTYPE
    says otherwise."""
    if (asked := os.environ.get("VLM_ENCODER_DTYPE")) in ("float32", "bfloat16"):
        return cast(Arithmetic, asked)
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"


def settled(options: EngineOptions) -> EngineOptions:
    """The options with `auto` replaced by what is best where this machine alone runs all of it. A cluster's
    machines have to agree: `auto` is float32 there. Raises ConfigError."""
    if options.encoder_dtype != "auto":
        return options
    best: Arithmetic = "float32"
    if options.device == "cpu" and fast_arithmetic() == "bfloat16" and _is_large(options.model):
        best = "bfloat16"
    return replace(options, encoder_dtype=best)


def _is_large(model: str) -> bool:
    source = ModelSource.parse(model)
    with naming(source.directory):
        checkpoint = Checkpoint.read(source.directory)
        config = source.open_clip_config(checkpoint.decoder.d_model) if source.tower else checkpoint.encoder
    square = config.geometry.squares(1)
    return not square.tile_width or config.shape.flops(square) >= WORTH_FLOPS
