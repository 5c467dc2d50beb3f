"""`vlm bench quantise` asks every storage the same questions and finds the planned bytes."""

from __future__ import annotations

import pytest

from llm.backend.native_build import why_unavailable
from vlm.bench.decode_bench import DEFAULT_MODEL
from vlm.bench.quantise_bench import FULL, STORED, TIMED, StoredWeights, accuracy, sizes, speed

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def test_measured_bytes_are_the_planned_ones() -> None:
    found = sizes()
    assert len(found) == 2 * len(STORED)
    for name, entry in found.items():
        assert entry["value"] == entry["planned"], name
    full, small = found[f"weight_bytes_{FULL.name}"], found["weight_bytes_weights_int4_kv_int8"]
    assert small["read_per_step"] < full["read_per_step"] / 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "points"), [(StoredWeights("int8", "int8"), 1.0), (StoredWeights("int4", "int8"), 3.0)]
)
def test_fields_read_from_small_numbers_are_as_right(
    how: StoredWeights, points: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 100 documents; what the benchmark's 200 give stands in the README."""
    monkeypatch.setattr("vlm.bench.quantise_bench.STORED", (FULL, how))
    found = accuracy(100)
    exact, rounded = found[f"field_accuracy_{FULL.name}"], found[f"field_accuracy_{how.name}"]
    assert exact["equal_answers"] == 1.0 and exact["points_over_float32"] == 0.0
    assert exact["fields_asked"] == rounded["fields_asked"] > 100
    assert rounded["points_over_float32"] >= -points
    assert rounded["equal_answers"] > 0.8


def test_every_figure_of_speed_says_its_circumstances() -> None:
    found = speed(DEFAULT_MODEL, 1, 1)
    assert set(found) == {f"decode_over_fp32_b1_{how.name}" for how in TIMED}
    for entry in found.values():
        assert entry["value"] > 0
        assert {"unit", "model", "dtype", "threads", "batch", "context", "spread"} <= set(entry)
