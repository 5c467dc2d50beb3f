"""Every figure of "LLM Inference 101" that its formulas give, with its rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from article_formulas import decode_wall
from figures import shows

from llm.cost import (
    DecoderShape,
    Precision,
    decode_time,
    decode_work,
    kv_bytes,
    kv_bytes_per_token,
    prefill_time,
    prefill_work,
    weight_bytes,
)
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.labs import roofline

GB, GIB = 1e9, 2**30
A100, RTX4090 = load_machine("a100"), load_machine("rtx4090")


def decoder(name: str) -> DecoderShape:
    return load_model(name).decoder.lumped()


LLAMA_8B, LLAMA_70B, LLAMA_2_7B = decoder("llama-3-8b"), decoder("llama-3.1-70b"), decoder("llama-2-7b")


def test_the_ridge_point_of_an_a100() -> None:
    assert shows(A100.ridge(), "153")


@pytest.mark.parametrize(("weight", "intensity"), [(2, 1), (1, 2), (0.5, 4)])
def test_quantisation_raises_the_intensity_of_decode(weight: float, intensity: int) -> None:
    work = decode_work(LLAMA_8B, 1, 1, Precision(weight))
    assert shows(work.flops / work.weight_bytes, str(intensity))


@pytest.mark.parametrize(("tokens", "binds"), [(2000, "compute"), (40, "bandwidth")])
def test_a_short_prefill_is_bandwidth_bound(tokens: int, binds: str) -> None:
    weights_only = prefill_work(LLAMA_8B, tokens).flops / weight_bytes(LLAMA_8B)
    assert weights_only == pytest.approx(tokens, rel=0.05)
    assert prefill_time(LLAMA_8B, A100, tokens).binds == binds
    assert (weights_only > A100.ridge()) == (binds == "compute")


def test_decode_at_batch_200_is_past_the_ridge() -> None:
    work = decode_work(LLAMA_8B, 200, 1)
    assert work.flops / work.weight_bytes == pytest.approx(200, rel=0.01) and A100.ridge() < 200


def test_320_kib_per_token_and_its_four_contexts() -> None:
    assert kv_bytes_per_token(LLAMA_70B) == 327_680 == 320 * 1024
    sizes = [(1, 4096, 1.25), (8, 4096, 10), (1, 131072, 40), (8, 131072, 320)]
    for users, context, gib in sizes:
        assert users * kv_bytes(LLAMA_70B, context) / GIB == gib


def test_grouped_queries_already_save_eight_times() -> None:
    mha = replace(LLAMA_70B, num_kv_heads=64)
    assert kv_bytes_per_token(mha) == 8 * kv_bytes_per_token(LLAMA_70B)


def test_weights() -> None:
    assert shows(weight_bytes(LLAMA_70B) / GB, "140", step="5")
    assert 14 * GB == 2 * 7e9


def test_490000_tokens_and_60_users_take_gib_for_gb() -> None:
    """60 GB over 128 KiB is 457,764 tokens and 55 users of 8k; 490,000 and 60 follow from 60 GiB."""
    per_token = kv_bytes_per_token(LLAMA_8B)
    assert (80 - 16 - 4) == 60
    assert shows(60 * GIB / per_token, "490,000") and 60 * GIB / per_token / 8192 == 60
    assert int(60 * GB / per_token) == 457_763 and int(60 * GB // kv_bytes(LLAMA_8B, 8192)) == 55


def test_end_to_end_latency_and_the_cost_of_a_doubled_batch() -> None:
    before = roofline.end_to_end_seconds(0.400, 0.025, 100)
    after = roofline.end_to_end_seconds(0.400, 0.035, 100)
    assert shows(before * 1e3, "2,875") and shows(after * 1e3, "3,865")
    assert shows(before, "2.9") and shows(after, "3.9")
    assert shows((after / before - 1) * 100, "34")
    assert 1 / 0.025 == 40


def test_the_batch_1_ceiling_of_an_a100() -> None:
    """7.85 ms is 16 GB over 2,039 GB/s; the model's 16.06 GB make 7.88. Both are 127 tok/s."""
    rounded = replace(LLAMA_8B, num_params=8_000_000_000)
    assert shows(1e3 / decode_wall(rounded, A100), "7.85")
    assert shows(1e3 / decode_wall(LLAMA_8B, A100), "7.88")
    assert shows(decode_wall(rounded, A100), "127") and shows(decode_wall(LLAMA_8B, A100), "127")
    slow, fast = (replace(A100, bandwidth_efficiency=share) for share in (0.6, 0.8))
    for machine, figure in ((slow, "80"), (fast, "100")):
        assert shows(decode_wall(rounded, machine), figure, step="10")


def test_4050_tokens_per_s_is_rounded_down_from_4076() -> None:
    """32 tokens in 7.85 ms are 4,076 tok/s; 32 times 127 are 4,064. Nothing stated gives 4,050."""
    assert shows(32 / 7.85e-3, "4076")
    assert 32 * 127 == 4064
    rounded = replace(LLAMA_8B, num_params=8_000_000_000)
    assert shows(32 * decode_wall(rounded, A100), "4078")
    with_caches = decode_time(LLAMA_8B, A100, 32, 1024)
    assert 32 / with_caches.seconds < 4050


def test_awq_on_a_4090_is_70_and_67_percent_of_the_wall() -> None:
    assert shows(weight_bytes(LLAMA_2_7B) / GB, "13.5")
    wall_16, wall_4 = RTX4090.bandwidth / 13.5e9, RTX4090.bandwidth / 3.5e9
    assert shows(wall_16, "74.7") and shows(wall_4, "288")
    assert shows(52 / wall_16 * 100, "70", step="1") and shows(194 / wall_4 * 100, "67")
    assert shows(decode_wall(LLAMA_2_7B, RTX4090), "74.8")  # from 13.48 GB
