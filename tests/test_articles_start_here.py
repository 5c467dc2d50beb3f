"""Every figure of "Start Here: The Words Everyone Uses About LLM Inference", with its rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from article_formulas import decode_wall
from figures import shows

from llm.cost import (
    DecoderShape,
    Machine,
    Precision,
    decode_time,
    decode_work,
    distinct_experts,
    kv_bytes,
    prefill_work,
    weight_bytes,
    weights_read,
)
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.labs import roofline

GB = 1e9
H100 = replace(load_machine("h100"), peak_flops=990e12)  # this article's peak; the first one has 989
SEVENTY = replace(load_model("llama-3.1-70b").decoder.lumped(), num_params=70_000_000_000)
BYTE = Precision(weight_bytes=1)  # "stored at one byte per parameter", the cache in 16 bits


@pytest.mark.parametrize(
    ("peak", "bandwidth", "figure"), [(990, 3.35, "296"), (312, 2.04, "153"), (362, 0.864, "419")]
)
def test_ridge_points(peak: float, bandwidth: float, figure: str) -> None:
    assert shows(Machine("", peak * 1e12, bandwidth * 1e12, 1).ridge(), figure, step="1")


@pytest.mark.parametrize(("element_bytes", "gigabytes"), [(2, 140), (1, 70), (0.5, 35)])
def test_what_a_70b_model_reads_per_token(element_bytes: float, gigabytes: int) -> None:
    assert weight_bytes(SEVENTY, element_bytes) == gigabytes * GB
    assert decode_work(SEVENTY, 1, 1, Precision(element_bytes)).weight_bytes == gigabytes * GB


def test_a_4000_token_prompt_is_far_past_the_ridge() -> None:
    intensity = prefill_work(SEVENTY, 4000).flops / weight_bytes(SEVENTY)
    assert shows(intensity, "4,000") and intensity > 10 * H100.ridge()


@pytest.mark.parametrize(("batch", "share", "step"), [(32, "0.1", None), (8, "0.03", None), (296, "1", "1")])
def test_decode_intensity_is_the_number_of_users(batch: int, share: str, step: str | None) -> None:
    work = decode_work(SEVENTY, batch, 1)
    assert work.flops / work.weight_bytes == pytest.approx(batch, rel=1e-3)
    assert shows(batch / H100.ridge(), share, step)
    assert batch != 8 or batch / H100.ridge() < 0.03  # "under 3%"


def test_experts_divide_the_intensity() -> None:
    model: DecoderShape = load_model("qwen3.6-35b-a3b").decoder
    share = model.experts_per_token / model.num_experts
    assert (model.experts_per_token, model.num_experts) == (8, 256)
    assert shows(share, "0.031")
    assert shows(296 / share, "9,500", step="100")
    assert shows(model.num_params / 1e9, "35") and shows(model.active_params / 1e9, "3")


def test_a_crowd_reads_almost_every_expert() -> None:
    model = load_model("qwen3.6-35b-a3b").decoder
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 200) > 0.99 * 256
    assert weights_read(model, 200) > 8 * weights_read(model, 1)


def test_decode_attention_has_the_intensity_of_its_group() -> None:
    assert roofline.long_context_intensity(SEVENTY) == pytest.approx(8)


def test_one_user_alone() -> None:
    assert shows(decode_wall(SEVENTY, H100, BYTE), "48")
    assert shows(1e3 / decode_wall(SEVENTY, H100, BYTE), "21")
    assert shows(decode_wall(SEVENTY, H100, BYTE) * 0.75, "36")  # words a second


def test_thirty_two_users_with_short_conversations() -> None:
    assert shows(32 * kv_bytes(SEVENTY, 2000) / GB, "21")
    assert shows(decode_time(SEVENTY, H100, 32, 2000, BYTE).bandwidth_s * 1e3, "27")


def test_twenty_four_times_is_24_6_cut_short() -> None:
    """The card's output goes up 24.6 times, 32 x 20.9 / 27.2 ms; from the rounded 21 and 27 ms, 24.9."""
    alone = decode_time(SEVENTY, H100, 1, 1, BYTE).bandwidth_s
    together = decode_time(SEVENTY, H100, 32, 2000, BYTE).bandwidth_s
    assert shows(32 * alone / together, "24.6")
    assert int(32 * alone / together) == 24
    assert shows(32 * 21 / 27, "24.9")
