"""Four layers of Gemma 3 4B's shape with random weights: a slice whose figures are the whole's, per layer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MODEL = "Gemma 3 4B shape, 4 of 34 layers, random"
SPAN_TOKENS = 256  # of an image
_LAYERS, _LAYERS_OF_4B, _VOCAB_OF_4B = 4, 34, 262_208
CONFIG: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": [*["sliding_attention"] * (_LAYERS - 1), "full_attention"],
    "sliding_window": 1024,
    # cut as the layers are, so that the head has the share of a step that it has in the whole
    "vocab_size": _VOCAB_OF_4B * _LAYERS // _LAYERS_OF_4B // 16 * 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@contextmanager
def gemma3_slice(**changes: Any) -> Iterator[Path]:
    """A bfloat16 checkpoint in a temporary directory, 0.9 GB. `changes`: of `CONFIG`."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**CONFIG | changes))
        model.to(torch.bfloat16).save_pretrained(directory)
        del model
        yield Path(directory)
