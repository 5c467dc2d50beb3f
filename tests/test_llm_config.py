"""Which configs the decoder accepts, and how it refuses the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoders import LLAMA3, SMALL, YARN
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm.decoder_config import ConfigError, DecoderConfig
from vlm.families.tiled import idefics3

LINEAR = {"rope_type": "linear"}
LLAMA = SMALL | {"model_type": "llama"}


def test_a_vlm_config_is_read_from_its_text_config_and_tied_by_the_outer_flag() -> None:
    outer = {"model_type": "smolvlm", "text_config": LLAMA | {"tie_word_embeddings": False}}
    assert not idefics3.decoder(outer).tied_embeddings
    assert idefics3.decoder(outer | {"tie_word_embeddings": True}).tied_embeddings
    assert idefics3.decoder(outer).num_kv_heads == 2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "granite"])
def test_left_out_keys_take_transformers_defaults(architecture: str) -> None:
    ours = DecoderConfig.from_hf({"model_type": architecture})
    theirs = AutoConfig.for_model(architecture)
    assert (ours.vocab_size, ours.d_model, ours.d_ff) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    ropes = theirs.rope_parameters
    kinds = [ropes] if "rope_theta" in ropes else [ropes["full_attention"], ropes["sliding_attention"]]
    assert [rope.theta for rope in ours.ropes] == [kind["rope_theta"] for kind in kinds]
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    slides = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    if architecture == "mistral":
        slides = [True] * theirs.num_hidden_layers
    assert set(ours.windows) == {theirs.sliding_window if slide else 0 for slide in slides or [False]}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": None}, "decoder type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_hf(LLAMA | extra)


def test_an_error_shows_no_more_than_a_short_word_of_the_config() -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_hf(LLAMA | {"model_type": "<b>/etc/passwd\n" * 100})
    assert "/" not in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


def test_qwen_slides_only_where_layer_types_say() -> None:
    base = SMALL | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
    assert DecoderConfig.from_hf(base).windows == (0, 0, 0)
    assert DecoderConfig.from_hf(base | {"use_sliding_window": True}).windows == (0, 0, 8)


@settings(deadline=None, max_examples=40)
@given(
    variant=st.sampled_from(
        [{"rope_type": "linear", "factor": 3.0}, LLAMA3, YARN, YARN | {"truncate": False}]
    ),
    theta=st.sampled_from([10_000.0, 500_000.0, 1e6]),
    factor=st.floats(1.0, 32.0),
    head_dim=st.sampled_from([8, 16, 64, 96, 128]),
    beta_fast=st.sampled_from([None, 16, 32]),
)
def test_inverse_frequencies_equal_transformers(
    variant: dict[str, Any], theta: float, factor: float, head_dim: int, beta_fast: int | None
) -> None:
    rope = variant | {"rope_theta": theta, "factor": factor}
    if rope["rope_type"] == "yarn" and beta_fast:
        rope["beta_fast"] = beta_fast
    values = LLAMA | {"head_dim": head_dim, "rope_parameters": rope}
    ours = DecoderConfig.from_hf(values).ropes[0]
    theirs, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](AutoConfig.for_model(**values), None)
    np.testing.assert_allclose(ours.inv_freq(), theirs.numpy(), rtol=1e-5)
    assert ours.scaling == pytest.approx(scaling)
