"""Random small text decoders of every supported architecture, and helpers to run backends over plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from llm.backend.base import Backend, StepItem, StepPlan

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Head counts 2 to 9, group sizes 1 to 8, head_dim 8 to 32, every rope variant, bias, norm and tie.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama_gqa2": {"model_type": "llama"},
    "llama_tied_mha": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama_mqa8_bias": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama_group3_llama3_rope": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_parameters": LLAMA3,
        "vocab_size": 173,
    },
    "llama_linear_rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
    },
    "llama_yarn_odd_sizes": {
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 90,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 12,
        "rope_parameters": YARN,
        "max_position_embeddings": 256,
    },
    "gemma3_two_ropes_four_norms": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    },
    "granite_multipliers_tied_bias": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2_bias_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_sliding_upper_layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3_qk_norm_wide_head": {"model_type": "qwen3", "head_dim": 32, "num_attention_heads": 6},
    "qwen3_attention_bias": {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 1},
    "mistral_sliding": {"model_type": "mistral", "sliding_window": 20},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 2},
}


def random_decoder(directory: Path, name: str, seed: int = 0, shard_size: str = "5GB") -> tuple[Path, Any]:
    """Writes a checkpoint of CONFIGS[name]; returns its path and the transformers model, float32.

    The head is scaled so that the median gap of the top two logits is above 0.1.
    """
    config = SMALL | CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
        model.model.embed_tokens.weight.normal_(0, 0.5)
        model.model.norm.weight.mul_(4)
    path = directory / f"{name}-{seed}"
    logging.disable_progress_bar()
    model.save_pretrained(path, max_shard_size=shard_size)
    return path, model


def block_table(backend: Backend, num_tokens: int, order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order[: -(-num_tokens // backend.block_size)])


def ids_of(seed: int, count: int) -> list[int]:
    """Random token ids of SMALL's vocabulary."""
    return torch.randint(0, SMALL["vocab_size"], (count,), generator=torch.manual_seed(seed)).tolist()


def execute(backend: Backend, plan: StepPlan) -> np.ndarray:
    """Logits of a step, read whole: float32 [sum of num_logits, vocab]."""
    logits = backend.execute(plan)
    rows = [logits[i] for i in range(len(logits))]
    return np.stack(rows) if rows else np.empty((0, backend.vocab_size), np.float32)


def run_chunks(
    backend: Backend, token_ids: Sequence[int], table: tuple[int, ...], chunks: Sequence[int]
) -> np.ndarray:
    """Logits [len(token_ids), vocab] of one sequence computed in chunks of these sizes, one step each."""
    rows, start = [], 0
    for size in chunks:
        ids = tuple(token_ids[start : start + size])
        rows.append(execute(backend, StepPlan((StepItem(ids, start, table, size),))))
        start += size
    assert start == len(token_ids)
    return np.concatenate(rows)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())
