"""Weights of a checkpoint directory, through its family. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from encoder.encoder_model import Encoder
from encoder.encoder_weights import load_encoder as load_encoder_weights
from llm.backend.base import Backend
from llm.backend.decoder import DecoderWeights
from llm.checkpoint.decoder_weights import load_backend as load_decoder_backend
from llm.checkpoint.decoder_weights import load_weights as load_decoder_weights
from vlm.checkpoint import Checkpoint


def load_encoder(
    directory: Path | str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Encoder:
    """Tower and connector. Raises as `Checkpoint` and `encoder.encoder_weights.load_encoder` do."""
    checkpoint = Checkpoint.read(directory)
    return load_encoder_weights(
        checkpoint.directory, checkpoint.encoder, checkpoint.visual_names, device=device, dtype=dtype
    )


def load_backend(directory: Path | str, **options: Any) -> Backend:
    """The decoder, ready to execute plans; options as of `llm.checkpoint.decoder_weights.load_backend`."""
    checkpoint = Checkpoint.read(directory)
    return load_decoder_backend(checkpoint.directory, checkpoint.decoder, checkpoint.text_names, **options)


def load_weights(directory: Path | str) -> DecoderWeights:
    """The decoder's tensors, float32, on the CPU."""
    checkpoint = Checkpoint.read(directory)
    return load_decoder_weights(checkpoint.directory, checkpoint.decoder, checkpoint.text_names)
