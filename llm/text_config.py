"""The decoder's part of a Hugging Face config.json: what it leaves out filled in, and what each layer sees.

Defaults are those of `transformers`' configuration classes; a test compares them. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["full", "sliding", "linear"]

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
    "glm_ocr_text": (1024, 4096, 16, 16, 8, None, 59392, 131072, None),
    "granite": (4096, 11008, 32, 32, None, None, 32000, 2048, None),
    "smollm3": (2048, 11008, 36, 16, 4, None, 128256, 32768, None),
    "mistral": (4096, 14336, 32, 32, 8, None, 32000, 131072, 4096),
    "ministral3": (4096, 14336, 34, 32, 8, 128, 131072, 262144, None),
    "mixtral": (4096, 14336, 32, 32, 8, None, 32000, 131072, None),
    "qwen2": (4096, 22016, 32, 32, 32, None, 151936, 32768, 4096),
    "qwen2_moe": (2048, 5632, 24, 16, 16, None, 151936, 32768, 4096),
    "qwen3": (4096, 22016, 32, 32, 32, 128, 151936, 32768, 4096),
    "qwen3_moe": (2048, 6144, 24, 32, 4, None, 151936, 32768, 4096),
    "qwen3_next": (2048, 5632, 48, 16, 2, 256, 151936, 32768, None),
    "qwen3_5_text": (4096, 12288, 32, 16, 4, 256, 248320, 32768, None),
    "qwen3_5_moe_text": (2048, None, 40, 16, 2, 256, 248320, 32768, None),
    "qwen2_vl_text": (8192, 29568, 80, 64, 8, None, 152064, 32768, 4096),
    "qwen2_5_vl_text": (8192, 29568, 80, 64, 8, None, 152064, 32768, 4096),
    "qwen3_vl_text": (4096, 22016, 32, 32, 32, 128, 151936, 128000, None),
    "paddleocr_vl_text": (1024, 3072, 18, 16, 2, 128, 103424, 131072, None),
    # Older checkpoints, with the decoder's keys in the outer config:
    "qwen2_vl": (8192, 29568, 80, 64, 8, None, 152064, 32768, 4096),
    "qwen2_5_vl": (8192, 29568, 80, 64, 8, None, 152064, 32768, 4096),
    "paddleocr_vl": (1024, 3072, 18, 16, 2, 128, 103424, 131072, None),
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


class ConfigError(ValueError):
    """A checkpoint whose config this decoder does not implement; the text is safe to show."""


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the checkpoint has no {path.name}") from None
    except (OSError, ValueError):
        raise ConfigError(f"the checkpoint's {path.name} is not readable JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"the checkpoint's {path.name} is not a JSON object")
    return value


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
_PARTS = ("text_config", "llm_config")
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
}
_WINDOWLESS = ("llama", "granite", "glm_ocr_text", "smollm3", "olmo2")  # their classes know no sliding_window
_FIRST_QWEN_WINDOW = 28  # default max_window_layers


def text_part(
    config: Mapping[str, Any], tied_default: bool | None = None, text_type: str = "llama"
) -> dict[str, Any]:
    """The decoder's own keys, of a part of the config where it is a model's that holds a decoder.

    The outer `tie_word_embeddings` wins over the inner one; where neither config has an outer flag,
    `tied_default` does, which is the outer class's default.
    """
    inner = next((config[key] for key in _PARTS if isinstance(config.get(key), Mapping)), None)
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    tied = config.get("tie_word_embeddings")
    tied = tied_default if tied is None else tied
    if tied is not None:
        text["tie_word_embeddings"] = tied
    text.setdefault("model_type", text_type)
    return text


def layer_kinds(text: Mapping[str, Any]) -> list[LayerKind]:
    """What each layer keeps per token: all positions, a window of them, or one state.

    Raises ConfigError where `layer_types` doesn't name a known kind for every layer.
    """
    num_layers, model_type = int(text["num_hidden_layers"]), str(text.get("model_type"))
    named = text.get("layer_types") or _spelled_out(text, num_layers, model_type)
    if len(named) != num_layers or any(kind not in _KINDS for kind in named):
        raise ConfigError("layer_types is not supported (supported: full_attention, sliding_attention)")
    kinds = [_KINDS[kind] for kind in named]
    if not _has_window(text, model_type):
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    return kinds


def _has_window(text: Mapping[str, Any], model_type: str) -> bool:
    """Qwen's classes drop the window unless `use_sliding_window` is set."""
    optional = model_type.startswith("qwen")
    return bool(text.get("sliding_window")) and bool(text.get("use_sliding_window", not optional))


def _spelled_out(text: Mapping[str, Any], num_layers: int, model_type: str) -> list[str]:
    """`layer_types` as the class of an older config would write it."""
    interval = int(text.get("full_attention_interval") or (4 if model_type in LINEAR else 0))
    if interval:
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    pattern = int(text.get("sliding_window_pattern") or SLIDING_PATTERN.get(model_type, 0))
    if pattern:
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if model_type in _WINDOWLESS:
        return ["full_attention"] * num_layers
    first = int(text.get("max_window_layers", _FIRST_QWEN_WINDOW)) if model_type.startswith("qwen") else 0
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
