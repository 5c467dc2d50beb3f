"""What a `config.json` may leave out: class defaults of `transformers`, checked against it by a test."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
)
_ROWS: dict[str, tuple[int | None, ...]] = {
    "llama": (4096, 11008, 32, 32, None, None, 32000, 2048, None),
    "smollm3": (2048, 11008, 36, 16, 4, None, 128256, 32768, None),
    "mistral": (4096, 14336, 32, 32, 8, None, 32000, 131072, 4096),
    "mixtral": (4096, 14336, 32, 32, 8, None, 32000, 131072, None),
    "qwen2": (4096, 22016, 32, 32, 32, None, 151936, 32768, 4096),
    "qwen2_moe": (2048, 5632, 24, 16, 16, None, 151936, 32768, 4096),
    "qwen3": (4096, 22016, 32, 32, 32, 128, 151936, 32768, 4096),
    "qwen3_moe": (2048, 6144, 24, 32, 4, None, 151936, 32768, 4096),
    "qwen3_next": (2048, 5632, 48, 16, 2, 256, 151936, 32768, None),
    "qwen3_5_text": (4096, 12288, 32, 16, 4, 256, 248320, 32768, None),
    "qwen3_5_moe_text": (2048, None, 40, 16, 2, 256, 248320, 32768, None),
    "gemma": (3072, 24576, 28, 16, 16, 256, 256000, 8192, None),
    "gemma2": (2304, 9216, 26, 8, 4, 256, 256000, 8192, 4096),
    "gemma3_text": (2304, 9216, 26, 8, 4, 256, 262208, 131072, 4096),
    "olmo2": (4096, 11008, 32, 32, None, None, 50304, 2048, None),
    "deepseek_v3": (7168, 18432, 61, 128, 128, None, 129280, 4096, None),
    "gpt_neox": (6144, 24576, 44, 64, None, None, 50432, 2048, None),
    "starcoder2": (3072, 12288, 30, 24, 2, None, 49152, 4096, None),
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_next": {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_moe_text": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "deepseek_v3": {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}


def class_defaults(model_type: str) -> dict[str, Any]:
    """Sizes of a family's configuration class; empty for a family that isn't listed."""
    row = _ROWS.get(model_type, ())
    sizes = {name: value for name, value in zip(_NAMES, row, strict=False) if value is not None}
    linear = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return {**sizes, **_EXPERTS.get(model_type, {}), **(linear if model_type in LINEAR else {})}


LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6}  # every n-th layer sees everything
