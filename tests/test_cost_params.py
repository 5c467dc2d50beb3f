"""Parameter counts from a config against the reference implementation's own modules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from llm.cost import CostError, DecoderShape
from llm.cost.param_counts import FAMILIES

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
ABSENT = "absent"  # a key that the family's configs don't have
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"pad_token_id": 0}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3_moe", {**MOE, "head_dim": 32, "mlp_only_layers": [1]}),
    ("qwen3_next", {**MOE, **LINEAR, "shared_expert_intermediate_size": 40}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_moe_text", {**MOE, **LINEAR, "shared_expert_intermediate_size": 40}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 32, "sliding_window": 32}),
    ("gemma3_text", {"head_dim": 32, "sliding_window": 32}),
    ("olmo2", {}),
    ("deepseek_v2", MLA),
    ("deepseek_v3", {**MLA, "q_lora_rank": None}),
    ("gpt2", {"num_key_value_heads": ABSENT, "intermediate_size": ABSENT}),
    ("gpt_neox", {"tie_word_embeddings": False, "num_key_value_heads": ABSENT}),
    ("starcoder2", {}),
]


def _reference(model_type: str, changes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The config as `transformers` writes it, and the parameters it makes from it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = {key: value for key, value in {**BASE, **changes}.items() if value is not ABSENT}
        config = AutoConfig.for_model(model_type, **keys)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    return config.to_dict(), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gpt2", "deepseek_v2"}))
def test_what_a_config_leaves_out_is_the_references_default(model_type: str) -> None:
    from transformers import AutoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = AutoConfig.for_model(model_type).to_dict()
    assert DecoderShape.from_config({"model_type": model_type}) == DecoderShape.from_config(full)


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_param_counts_equal_the_reference(model_type: str, changes: dict[str, Any]) -> None:
    config, expected = _reference(model_type, changes)
    shape = DecoderShape.from_config(config)
    assert shape.known_family
    assert shape.num_params == expected


def test_a_model_with_a_text_config_is_read_by_its_decoder() -> None:
    inner = {**BASE, "model_type": "llama"}
    outer = {"model_type": "smolvlm", "text_config": inner, "tie_word_embeddings": True}
    untied = DecoderShape.from_config(inner)
    tied = DecoderShape.from_config(outer)
    assert untied.num_params - tied.num_params == 320 * 64
    assert tied.embed_params == 0 and untied.embed_params == 320 * 64


def test_an_unknown_family_is_counted_as_llama_and_says_so() -> None:
    shape = DecoderShape.from_config({**BASE, "model_type": "newcomer"})
    assert not shape.known_family
    assert shape.num_params == DecoderShape.from_config({**BASE, "model_type": "llama"}).num_params


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(CostError, match=key):
        DecoderShape.from_config(
            {"model_type": "newcomer", **{name: value for name, value in BASE.items() if name != key}}
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "wide"},
        {"num_key_value_heads": 3},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["odd"] * 4},
    ],
)
def test_nonsense_sizes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CostError):
        DecoderShape.from_config({**BASE, **changes})
