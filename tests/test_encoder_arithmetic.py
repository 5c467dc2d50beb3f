"""Towers that multiply in bfloat16: near float32 ones, alike in any company, never under their keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.encoder_config import TowerConfig
from encoder.encoder_model import Encoder
from encoder.forward.mixed import HalfLinear, multiply_in_bfloat16
from encoder.tower import Tower
from llm.request import SamplingParams
from vlm.arithmetic import settled
from vlm.build import build_encoder, build_local_pipeline, visual_format
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.loading import load_encoder
from vlm.model_source import ModelSource
from vlm.pipeline import ChatMessage, ImageInput
from vlm.plan.machine.synthetic import Sizes, write_checkpoint
from vlm.spec import ModelSpec

HALF = EngineOptions(encoder_dtype="bfloat16")


@pytest.fixture(scope="module")
def encoders() -> tuple[Encoder, Encoder]:
    exact, half = load_encoder(DEFAULT_MODEL), load_encoder(DEFAULT_MODEL)
    half.multiply_in("bfloat16")
    return exact, half


def tiles_of(seed: int, count: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


@settings(deadline=None, max_examples=10)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_visual_tokens_are_near_float32_ones_and_the_same_in_any_company(
    encoders: tuple[Encoder, Encoder], counts: list[int], seed: int
) -> None:
    exact, half = encoders
    images = [tiles_of(seed + i, count, exact.config.geometry.image_size) for i, count in enumerate(counts)]
    together = half.encode(images)
    for tiles, got, want in zip(images, together, exact.encode(images), strict=True):
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 0.02
        torch.testing.assert_close(got, half.encode([tiles])[0], rtol=0, atol=0)


def test_what_adds_up_over_the_layers_stays_float32(encoders: tuple[Encoder, Encoder]) -> None:
    _, half = encoders
    assert any(isinstance(module, HalfLinear) for module in half.connector.modules())
    seen: set[torch.dtype] = set()
    for block in half.tower.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    half.encode([tiles_of(0, 1, half.config.geometry.image_size)])
    assert seen == {torch.float32}


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "activation": "gelu"},
        {"rope": "axial", "table": "none", "norm": "rms", "gated": True, "activation": "silu"},
    ],
    ids=["norms of q and k", "rope and gates"],
)
def test_every_kind_of_tower_may_multiply_so(options: dict[str, Any]) -> None:
    config = TowerConfig(
        width=64, num_layers=2, num_heads=4, intermediate=96, image_size=56, patch_size=14, **options
    )
    torch.manual_seed(0)
    tower = Tower(config).eval().requires_grad_(False)
    for parameter in tower.parameters():
        parameter.normal_(0, 0.2)
    pixels = torch.randn(2, 3, 56, 56)
    want = tower(pixels)
    multiply_in_bfloat16(tower)
    got = tower(pixels)
    assert got.dtype == torch.float32
    assert 0 < float((got - want).norm() / want.norm()) < 0.05


def test_every_part_that_makes_a_key_knows_the_arithmetic() -> None:
    exact, half = (ModelSpec.load(DEFAULT_MODEL, arithmetic=one) for one in ("float32", "bfloat16"))
    assert exact.revision != half.revision
    spec = exact.preprocess_spec("auto")
    assert exact.visual_key("a" * 64, spec) != half.visual_key("a" * 64, spec)
    assert build_encoder(ModelSource.parse("default"), HALF).revision == half.revision
    assert visual_format(HALF).revision == half.revision != visual_format(EngineOptions()).revision


@pytest.mark.parametrize(
    ("flags", "best"),
    [({"avx2"}, "float32"), ({"avx512_bf16"}, "bfloat16"), ({"amx_bf16", "amx_tile"}, "bfloat16")],
)
def test_auto_is_what_the_cpu_does_best_for_large_towers_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: set[str], best: str
) -> None:
    monkeypatch.delenv("VLM_ENCODER_DTYPE")
    monkeypatch.setattr("vlm.arithmetic.cpu_flags", lambda: frozenset(flags))
    small = EngineOptions(model=str(write_checkpoint(tmp_path / "small", Sizes())))
    wide = Sizes(vision_width=768, vision_ff=3072, vision_layers=2, vision_heads=12, image_size=512)
    large = EngineOptions(model=str(write_checkpoint(tmp_path / "large", wide)))
    assert settled(large).encoder_dtype == best
    assert settled(small).encoder_dtype == "float32"
    assert large.arithmetic == "float32"  # as a cluster's workers take it
    assert settled(replace(large, device="cuda")).encoder_dtype == "float32"
    assert settled(replace(small, encoder_dtype="bfloat16")).encoder_dtype == "bfloat16"
    monkeypatch.setenv("VLM_ENCODER_DTYPE", "float32")
    assert settled(large).encoder_dtype == "float32"


def test_an_encoder_of_another_type_keeps_it() -> None:
    options = EngineOptions(dtype="bfloat16", encoder_dtype="bfloat16")
    assert options.arithmetic == "float32"
    assert (
        ModelSpec.load(DEFAULT_MODEL, arithmetic=options.arithmetic).revision
        == visual_format(options).revision
    )


def test_the_sample_is_read_as_in_float32() -> None:
    invoice = (Path(__file__).parent.parent / "vlm/samples/invoice.png").read_bytes()

    async def read(options: EngineOptions) -> str:
        pipeline = build_local_pipeline(options)
        await pipeline.start()
        try:
            message = ChatMessage("user", (ImageInput(invoice), "Read the text."))
            prepared = pipeline.prepare("r", [message], SamplingParams(max_tokens=90))
            return (await pipeline.answer(prepared)).choices[0].text
        finally:
            await pipeline.close()

    assert asyncio.run(read(HALF)) == asyncio.run(read(EngineOptions(encoder_dtype="float32")))
