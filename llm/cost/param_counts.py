"""Counts a decoder's parameters from its Hugging Face `config.json`, by family.

Reference for every count: `transformers` with the same config (tests/test_cost_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llm.text_config import LayerKind, class_defaults, layer_kinds, text_part

Config = Mapping[str, Any]


class CostError(ValueError):
    """A config or a request that can't be priced. The message is safe to show a client."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a family differs from Llama: pre-norm, RMSNorm, gated MLP, no biases, untied head."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    norms_per_layer: int = 2
    norm_bias: bool = False
    gated_mlp: bool = True
    mlp_bias: bool = False
    gated_query: bool = False  # the query projection also makes an output gate
    shared_expert_gate: bool = False
    tied: bool = False
    positions: bool = False  # learned position embeddings


_LAYER_NORM = WeightLayout(
    qkv_bias=True, out_bias=True, norm_bias=True, gated_mlp=False, mlp_bias=True, positions=False
)
FAMILIES: dict[str, WeightLayout] = {
    "llama": WeightLayout(),
    "glm_ocr_text": WeightLayout(norms_per_layer=4),
    "granite": WeightLayout(),
    "smollm3": WeightLayout(tied=True),
    "mistral": WeightLayout(),
    "ministral3": WeightLayout(),
    "mixtral": WeightLayout(),
    "qwen2": WeightLayout(qkv_bias=True),
    "qwen2_moe": WeightLayout(qkv_bias=True, shared_expert_gate=True),
    "qwen3": WeightLayout(qk_norm="head"),
    "qwen3_moe": WeightLayout(qk_norm="head"),
    "qwen3_next": WeightLayout(qk_norm="head", gated_query=True, shared_expert_gate=True),
    "qwen3_5_text": WeightLayout(qk_norm="head", gated_query=True),
    "qwen3_5_moe_text": WeightLayout(qk_norm="head", gated_query=True, shared_expert_gate=True),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"), WeightLayout(qkv_bias=True)
    ),
    "qwen3_vl_text": WeightLayout(qk_norm="head"),
    **dict.fromkeys(("paddleocr_vl_text", "paddleocr_vl"), WeightLayout(tied=True)),
    "gemma": WeightLayout(tied=True),
    "gemma2": WeightLayout(norms_per_layer=4, tied=True),
    "gemma3_text": WeightLayout(qk_norm="head", norms_per_layer=4, tied=True),
    "olmo2": WeightLayout(qk_norm="full"),
    "deepseek_v2": WeightLayout(),
    "deepseek_v3": WeightLayout(),
    "gpt2": WeightLayout(
        qkv_bias=True,
        out_bias=True,
        norm_bias=True,
        gated_mlp=False,
        mlp_bias=True,
        tied=True,
        positions=True,
    ),
    "gpt_neox": _LAYER_NORM,
    "starcoder2": WeightLayout(
        qkv_bias=True, out_bias=True, norm_bias=True, gated_mlp=False, mlp_bias=True, tied=True
    ),
}

_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_sequence_length"),
    "num_experts": ("n_routed_experts", "num_local_experts"),
}


def read(config: Config, key: str, default: Any = None) -> Any:
    """The value of `key` under any of its names; `CostError` if there is none and no default."""
    for name in (key, *_ALIASES.get(key, ())):
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise CostError(f"the config lacks {key}")
    return default


def text_config(config: Config, tied_default: bool | None = None, text_type: str = "llama") -> dict[str, Any]:
    """The decoder's part of a config, what it leaves out filled in from its family's class."""
    text = text_part(config, tied_default, text_type)
    defaults = class_defaults(str(text["model_type"]))
    aliased = {alias for key in text for names in _names_of(key) for alias in names}
    return {**{key: value for key, value in defaults.items() if key not in aliased}, **text}


def _names_of(key: str) -> list[tuple[str, ...]]:
    return [(name, *others) for name, others in _ALIASES.items() if key == name or key in others]


def family_of(config: Config) -> tuple[WeightLayout, bool]:
    """The decoder's family and whether it is one we know; others are counted as Llama's."""
    name = str(config.get("model_type", "llama"))
    return FAMILIES.get(name, FAMILIES["llama"]), name in FAMILIES


def layer_types(config: Config) -> list[LayerKind]:
    """Raises ConfigError as `layer_kinds` does."""
    return layer_kinds({**config, "num_hidden_layers": int(read(config, "num_hidden_layers"))})


@dataclass(frozen=True, slots=True)
class ParamCounts:
    """Parameters of a decoder. `expert` is one expert's, summed over the layers that have experts."""

    total: int
    embed: int  # looked up only; 0 when the head is tied to it
    head: int
    expert: int


def count_params(config: Config) -> ParamCounts:
    """Exact for the families in `FAMILIES`; elsewhere what Llama would have at these sizes."""
    family, _ = family_of(config)
    d = int(read(config, "hidden_size"))
    vocab = int(read(config, "vocab_size"))
    norm = d * (2 if family.norm_bias else 1)
    attention = {
        "full": attention_params(config, family),
        "sliding": attention_params(config, family),
        "linear": linear_attention_params(config) if "linear" in layer_types(config) else 0,
    }
    layers = 0
    expert = 0
    for index, kind in enumerate(layer_types(config)):
        layers += attention[kind] + family.norms_per_layer * norm
        if is_sparse_layer(config, index):
            one = gated_mlp_params(d, int(read(config, "moe_intermediate_size", _dense_width(config))))
            expert += one
            layers += int(read(config, "num_experts")) * one + shared_params(config, family)
        else:
            layers += mlp_params(config, family)
    tied = config.get("tie_word_embeddings")
    tied = family.tied if tied is None else bool(tied)
    table = vocab * d
    positions = int(read(config, "max_position_embeddings")) * d if family.positions else 0
    total = layers + norm + table * (1 if tied else 2) + positions
    return ParamCounts(total, 0 if tied else table, table, expert)


def _dense_width(config: Config) -> int:
    return int(read(config, "intermediate_size", 4 * int(read(config, "hidden_size"))))


def head_dim_of(config: Config) -> int:
    return int(read(config, "head_dim", int(read(config, "hidden_size")) // _num_heads(config)))


def num_kv_heads_of(config: Config) -> int:
    return int(read(config, "num_key_value_heads", _num_heads(config)))


def _num_heads(config: Config) -> int:
    return int(read(config, "num_attention_heads"))


def attention_params(config: Config, family: WeightLayout) -> int:
    d, heads = int(read(config, "hidden_size")), _num_heads(config)
    if config.get("kv_lora_rank"):
        return mla_params(config)
    head_dim = head_dim_of(config)
    q, kv = heads * head_dim, num_kv_heads_of(config) * head_dim
    params = d * (q * (2 if family.gated_query else 1) + 2 * kv) + q * d
    bias = bool(config.get("attention_bias", False) or config.get("use_bias", False))
    if family.qkv_bias or bias:
        params += q + 2 * kv
    if family.out_bias or bias:
        params += d
    if family.qk_norm == "head":
        params += 2 * head_dim
    elif family.qk_norm == "full":
        params += q + kv
    return params


def mla_params(config: Config) -> int:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    d, heads = int(read(config, "hidden_size")), _num_heads(config)
    latent, rope = int(read(config, "kv_lora_rank")), int(read(config, "qk_rope_head_dim"))
    nope, v_dim = int(read(config, "qk_nope_head_dim")), int(read(config, "v_head_dim"))
    query = heads * (nope + rope)
    rank = config.get("q_lora_rank")
    query_params = d * query if not rank else d * rank + rank + rank * query
    down = d * (latent + rope) + latent
    up = latent * heads * (nope + v_dim)
    return int(query_params + down + up + heads * v_dim * d)


def linear_attention_params(config: Config) -> int:
    """Gated DeltaNet as in Qwen3-Next: projections, a short convolution, decay, gate and norm."""
    d = int(read(config, "hidden_size"))
    keys = int(read(config, "linear_num_key_heads")) * int(read(config, "linear_key_head_dim"))
    value_heads, value_dim = (
        int(read(config, "linear_num_value_heads")),
        int(read(config, "linear_value_head_dim")),
    )
    values = value_heads * value_dim
    mixed = 2 * keys + values
    projections = d * (mixed + values + 2 * value_heads) + values * d
    return projections + mixed * int(read(config, "linear_conv_kernel_dim", 4)) + 2 * value_heads + value_dim


def gated_mlp_params(d: int, width: int) -> int:
    return 3 * d * width


def mlp_params(config: Config, family: WeightLayout) -> int:
    d, width = int(read(config, "hidden_size")), _dense_width(config)
    params = gated_mlp_params(d, width) if family.gated_mlp else 2 * d * width
    if family.mlp_bias or config.get("mlp_bias", False):
        params += (2 * width if family.gated_mlp else width) + d
    return params


def shared_params(config: Config, family: WeightLayout) -> int:
    """What every token of an expert layer uses: router and shared experts."""
    d = int(read(config, "hidden_size"))
    router = d * int(read(config, "num_experts"))
    width = int(config.get("shared_expert_intermediate_size") or 0)
    if config.get("n_shared_experts"):
        width = int(config["n_shared_experts"]) * int(read(config, "moe_intermediate_size"))
    gate = d if width and family.shared_expert_gate else 0
    return router + gated_mlp_params(d, width) + gate


def is_sparse_layer(config: Config, index: int) -> bool:
    if not any(config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts")):
        return False
    if index < int(config.get("first_k_dense_replace") or 0):
        return False
    if index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0
