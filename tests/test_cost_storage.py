"""The planner's bytes are the loaded engine's, for every option and to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoders import CONFIGS, random_decoder
from fidelity import DEFAULT_MODEL

from llm.backend.native_build import why_unavailable
from llm.cost import (
    DecoderShape,
    kv_block_bytes,
    kv_bytes,
    kv_bytes_per_token,
    kv_element_bytes,
    native_weight_bytes,
    stored_precision,
    weights_read,
)
from llm.cost.exact_bytes import padded
from llm.storage import KV_OPTIONS, WEIGHT_OPTIONS, KvStorage, WeightStorage, storage_of
from vlm.checkpoint import Checkpoint
from vlm.loading import load_backend
from vlm.plan.cli import kv as plan_kv

needs_native = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
WEIGHTS: list[WeightStorage] = [option for option in WEIGHT_OPTIONS if option != "auto"]
CACHES: list[KvStorage] = [option for option in KV_OPTIONS if option != "auto"]


@needs_native
@pytest.mark.parametrize("name", CONFIGS)
def test_weight_buffers_are_as_counted(name: str, tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, name)
    config = Checkpoint.read(path).decoder
    for storage in WEIGHTS:
        engine: Any = load_backend(path, num_blocks=8, backend="native", weights=storage)
        counted = native_weight_bytes(config, storage, "float32", engine.max_positions)
        assert (counted.per_step, counted.held) == (engine.weight_bytes, engine.held_bytes), storage


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("name", ["llama_mqa8_bias", "llama_yarn_odd_sizes", "qwen3_qk_norm_wide_head"])
def test_a_budget_holds_its_blocks_and_not_one_more(name: str, backend: Any, tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, name)
    c = Checkpoint.read(path).decoder
    for cache in CACHES:
        dtype = cache if backend == "torch" and cache != "int8" else "float32"
        engine: Any = load_backend(path, kv_bytes=100_000, backend=backend, dtype=dtype, kv=cache)
        value_dim = padded(c.head_dim) if backend == "native" else None
        one = kv_block_bytes(c.num_layers, c.num_kv_heads, c.head_dim, 16, cache, value_dim)
        assert engine.kv_bytes == engine.num_blocks * one <= 100_000 < engine.kv_bytes + one, cache


@pytest.mark.parametrize("name", [*CONFIGS])
def test_a_sequences_bytes_are_those_of_its_blocks_also_where_layers_have_a_window(
    name: str, tmp_path: Path
) -> None:
    path, _ = random_decoder(tmp_path, name)
    checkpoint = Checkpoint.read(path)
    engine: Any = load_backend(path, num_blocks=16, backend="torch")
    assert kv_bytes(checkpoint.shape, 250, 4, engine.block_size) == engine.kv_bytes


@needs_native
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_vlm_plan_prints_what_the_default_model_holds(
    weights: WeightStorage, cache: KvStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = Checkpoint.read(DEFAULT_MODEL).decoder.max_positions // 16
    engine: Any = load_backend(DEFAULT_MODEL, num_blocks=blocks, backend="native", weights=weights, kv=cache)
    plan_kv(
        "default", "h100", context=16 * blocks, sequences=1, weights=weights, kv_storage=cache, as_json=True
    )
    planned = json.loads(capsys.readouterr().out)
    assert planned["weight_bytes"] == engine.held_bytes
    assert planned["kv_total_bytes"] == engine.kv_bytes
    assert planned["kv_per_token_bytes"] * 16 * blocks == engine.kv_bytes


def test_the_bytes_of_a_step_are_those_that_are_read() -> None:
    config = Checkpoint.read(DEFAULT_MODEL).decoder
    shape = DecoderShape.from_config(json.loads((DEFAULT_MODEL / "config.json").read_text()))
    for storage in WEIGHTS:
        precision = stored_precision(shape, storage, "int8", config, "bfloat16")
        read = native_weight_bytes(config, storage, "bfloat16", config.max_positions).per_step
        assert weights_read(shape, 1) * precision.weight_bytes == pytest.approx(read)


@pytest.mark.parametrize("head_dim", [12, 32, 80, 96, 128])
def test_scales_of_an_int8_cache_come_to_whole_bytes(head_dim: int) -> None:
    shape = DecoderShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 6 * head_dim,
            "head_dim": head_dim,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_hidden_layers": 7,
            "intermediate_size": 64,
            "vocab_size": 100,
        }
    )
    token = 7 * 3 * 2 * (head_dim + 4)
    assert kv_bytes_per_token(shape, kv_element_bytes("int8", head_dim)) == token
    assert kv_bytes(shape, 33, kv_element_bytes("int8", head_dim), 16) == 48 * token


def test_a_storage_that_the_backend_lacks_is_named() -> None:
    assert storage_of("float32", "auto", "auto", native=True) == ("auto", "float32")
    assert storage_of("bfloat16", "auto", "int8", native=True) == ("bfloat16", "int8")
    with pytest.raises(
        ValueError, match="weights must be one of auto, float32, bfloat16, float16, int8, int4"
    ):
        storage_of("float32", "int3", "auto", native=True)
    with pytest.raises(ValueError, match="kv must be one of auto, float32, bfloat16, float16, int8"):
        storage_of("float32", "auto", "int4", native=True)
    with pytest.raises(ValueError, match="int8 weights need the native backend"):
        storage_of("float32", "int8", "auto", native=False)
    with pytest.raises(ValueError, match="bfloat16 KV cache needs the native backend"):
        storage_of("float32", "auto", "bfloat16", native=False)
