"""config.json of Gemma 3's published sizes. They leave out what a 4B has from Gemma3TextConfig."""

from __future__ import annotations

from typing import Any

TEXTS: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "27b": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
    },
}
VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}


def config_of(size: str) -> dict[str, Any]:
    return {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **TEXTS[size]},
        "vision_config": VISION,
        "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16",
    }
