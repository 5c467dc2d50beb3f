"""Captured forwards give what plain ones do, and a step waits for the encodes whose rows it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_twins import CpuRecorder, HostSync
from decoders import ids_of, random_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.encoder_model import Encoder
from encoder.forward.tile_graphs import COUNTS
from llm.backend.base import StepItem, StepPlan, VisualSlice
from llm.backend.cuda.paged_backend import PagedBackend
from vlm.config import DEFAULT_MODEL
from vlm.loading import load_backend, load_encoder


@pytest.fixture(scope="module")
def encoders() -> tuple[Encoder, Encoder]:
    plain, captured = load_encoder(DEFAULT_MODEL), load_encoder(DEFAULT_MODEL)
    captured.tiles_per_forward = max(COUNTS) + 2  # more than the largest graph has
    captured.capture_forwards(CpuRecorder)
    return plain, captured


def tiles_of(seed: int, count: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


@settings(deadline=None, max_examples=15)
@given(counts=st.lists(st.integers(1, 16), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_captured_forwards_give_the_visual_tokens_of_plain_ones(
    encoders: tuple[Encoder, Encoder], counts: list[int], seed: int
) -> None:
    plain, captured = encoders
    side = plain.config.geometry.image_size
    images = [tiles_of(seed + i, count, side) for i, count in enumerate(counts)]
    ticks = np.zeros(1, np.int64)
    captured.count_progress(ticks)
    for got, want in zip(captured.encode(images), plain.encode(images), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert ticks[0] >= 1


def test_a_forward_that_reads_a_number_is_found(
    encoders: tuple[Encoder, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = load_encoder(DEFAULT_MODEL)
    features = captured.tower.features

    def reading(pixels: torch.Tensor, *rest: Any) -> Any:
        return features(pixels * float(pixels.max()), *rest)

    monkeypatch.setattr(captured.tower, "features", reading)
    captured.capture_forwards(CpuRecorder)
    with pytest.raises(HostSync):
        captured.encode([tiles_of(0, 1, captured.config.geometry.image_size)])


def test_only_a_step_with_visual_rows_waits_for_encodes(tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, "mistral_sliding")
    backend = load_backend(path, num_blocks=8, backend="torch", attention="triton")
    assert isinstance(backend, PagedBackend)
    waited: list[str] = []
    note: Callable[[], None] = lambda: waited.append("wait")  # noqa: E731
    backend.wait_for_visuals = note
    ids = tuple(ids_of(0, 6))
    backend.execute(StepPlan((StepItem(ids, 0, (0,), 1),)))
    assert not waited
    rows = np.zeros((2, backend.config.row_width), np.float32)
    backend.execute(StepPlan((StepItem(ids, 0, (1,), 1, (VisualSlice(1, rows),)),)))
    assert waited == ["wait"]
