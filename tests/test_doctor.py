"""The machine's figures: fits find what made the times, and measuring makes a machine that predicts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.geometry import Grid, TowerShape
from llm.cost import Chunk, DecoderShape, Machine, Precision, decode_time, step_time
from vlm.checkpoint import Checkpoint
from vlm.plan.labs.image_lab import encode_time
from vlm.plan.machine.calibration import describe, preprocess_seconds
from vlm.plan.machine.probes import (
    BATCH,
    DECODERS,
    DECODES,
    THIN,
    TOWERS,
    decoder_probe,
    fit_decoder,
    fit_tower,
    non_negative_fit,
)
from vlm.plan.machine.rates import copy_bandwidth, gemm_rate
from vlm.plan.machine.synthetic import SMOLVLM_256M, Sizes, write_checkpoint

STORED = Precision(2, 4, 32)
TRUE = Machine(
    "made up",
    peak_flops=1.1e11,
    bandwidth=2e10,
    memory_bytes=1 << 34,
    compute_efficiency=0.8,
    decode_efficiency=0.7,
    tower_efficiency=0.6,
    overlap=0.4,
    step_overhead_s=2e-4,
    layer_overhead_s=5e-6,
    cold_step_s=3e-4,
    tower_call_s=1e-3,
    tower_overhead_s=2e-4,
    element_s=8e-9,
    tower_element_s=3e-8,
    cache_bytes=1 << 24,
    cache_bandwidth=6e10,
)


def decoder_shape(sizes: Sizes) -> DecoderShape:
    return DecoderShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": sizes.d_model,
            "intermediate_size": sizes.d_ff,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocab_size,
            "tie_word_embeddings": sizes.tied,
        }
    )


@dataclass
class MadeUp:
    """A probe whose medians are the cost core's times on a known machine."""

    shape: DecoderShape

    def median(self, kind: str, length: int) -> float:
        if kind == "prefill":
            return step_time(self.shape, TRUE, [Chunk(length)], STORED).seconds
        batch = BATCH if kind == "batch" else 1
        return decode_time(self.shape, TRUE, batch, length + DECODES // 2, STORED).seconds


def test_the_fit_finds_the_machine_that_made_the_times() -> None:
    probes: list[Any] = [MadeUp(decoder_shape(sizes)) for sizes in DECODERS]
    fit = fit_decoder(probes, STORED, TRUE.cache_bytes, peak=2e11)
    assert fit.step_s == pytest.approx(TRUE.step_overhead_s, rel=0.05)
    assert fit.layer_s == pytest.approx(TRUE.layer_overhead_s, rel=0.2)
    assert fit.bandwidth == pytest.approx(TRUE.bandwidth, rel=0.05)
    assert fit.rate == pytest.approx(TRUE.rate(), rel=0.05)
    assert fit.overlap == pytest.approx(TRUE.overlap, abs=0.1)
    assert fit.cold_s == pytest.approx(TRUE.cold_step_s, rel=0.1)
    assert fit.element_s == pytest.approx(TRUE.element_s, rel=0.1)


@dataclass
class MadeUpTower:
    shape: TowerShape

    @property
    def spec(self) -> MadeUpTower:
        return self

    @property
    def geometry(self) -> Any:
        return self.shape.geometry

    @property
    def seconds(self) -> dict[Grid, list[float]]:
        grids = [self.shape.geometry.squares(n) for n in (1, 5)]
        return {g: [encode_time(self.shape, TRUE, [g], STORED).seconds + g.num_tiles * 1e-4] for g in grids}

    def prompt_tokens(self, grid: Grid) -> int:
        return grid.num_tiles


def test_the_towers_fit_finds_its_machine(tmp_path: Path) -> None:

    probes: list[Any] = [
        MadeUpTower(Checkpoint.read(write_checkpoint(tmp_path / str(i), sizes)).encoder.shape)
        for i, sizes in enumerate(TOWERS)
    ]
    call_s, layer_s, rate, element_s = fit_tower(probes, 2e11, lambda length: length * 1e-4)
    predicted = Machine(
        "m",
        rate,
        1e15,
        1,
        tower_efficiency=1.0,
        tower_call_s=call_s,
        tower_overhead_s=layer_s,
        tower_element_s=element_s,
    )
    for probe in probes:
        for grid, taken in probe.seconds.items():
            expected = encode_time(probe.shape, predicted, [grid], STORED).seconds + grid.num_tiles * 1e-4
            assert expected == pytest.approx(taken[0], rel=0.1)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), st.integers(0, 1000))
def test_a_non_negative_fit_is_exact_on_exact_data(true: list[float], seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(0.1, 10, (12, 3))
    assert non_negative_fit(rows.tolist(), (rows @ true).tolist()) == pytest.approx(true, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000))
def test_a_non_negative_fit_of_noise_is_not_negative(seed: int) -> None:
    draw = np.random.default_rng(seed)
    found = non_negative_fit(draw.uniform(0, 1, (8, 4)).tolist(), draw.uniform(0.1, 1, 8).tolist())
    assert len(found) == 4 and min(found) >= 0


def test_a_random_checkpoint_is_complete_and_of_its_sizes(tmp_path: Path) -> None:
    from safetensors import safe_open

    from vlm.plan.catalog import load_model

    write_checkpoint(tmp_path, Sizes(num_layers=3, vision_layers=1, tied=False))
    model = load_model(str(tmp_path))
    assert model.tower is not None and Checkpoint.read(tmp_path).decoder.num_layers == 3
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        stored = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    assert stored == model.decoder.num_params + model.tower.num_params
    assert json.loads((tmp_path / "processor_config.json").read_text())["image_seq_len"] == 4


def test_smolvlm_256m_sizes_have_256m_parameters() -> None:
    from vlm.plan.catalog import load_model

    preset = load_model("smolvlm-256m")
    assert decoder_shape(SMOLVLM_256M).num_params == preset.decoder.num_params


def test_an_image_is_charged_once_however_many_tiles_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small image takes is told per tile, and every image here makes five."""
    now = [0.0]

    def ten_milliseconds(*_: Any) -> None:
        now[0] += 0.010

    monkeypatch.setattr("vlm.plan.machine.rates.time.process_time", lambda: now[0])
    monkeypatch.setattr("preprocess.stage.preprocess", ten_milliseconds)
    assert preprocess_seconds(2) == pytest.approx((0.0, 0.010 / 5))


def test_small_measurements_are_positive() -> None:
    assert copy_bandwidth(1 << 20, 2) > 0
    per_megapixel, per_tile = preprocess_seconds(1)
    assert per_tile > 0 and per_megapixel >= 0


@pytest.mark.parametrize("tick_s", [0.01, 1e9])
def test_a_machine_whose_processor_clock_hardly_ticks_is_measured_by_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tick_s: float
) -> None:
    fine = time.process_time
    monkeypatch.setattr(time, "process_time", lambda: fine() // tick_s * tick_s)
    probe = decoder_probe(write_checkpoint(tmp_path, THIN))
    probe.round()
    assert min(probe.median(kind, length) for kind, length in probe.seconds) > 0
    assert copy_bandwidth(1 << 20, 2) < float("inf") and gemm_rate("cpu", 1) < float("inf")
    assert preprocess_seconds(1)[1] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_this_machine_is_measured_and_described() -> None:
    from vlm.plan.machine.calibration import measure_machine

    machine = measure_machine(quick=True)
    assert machine.memory_bytes > 1 << 28 and machine.source.startswith("measured")
    figures = describe(machine)
    assert 0.5 < figures["bandwidth_gb_s"] < 1000 and 1 < figures["prefill_gflop_s"] < 10_000
    assert 0 <= machine.overlap <= 1 and machine.step_overhead_s < 0.1
