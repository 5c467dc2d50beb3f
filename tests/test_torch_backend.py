"""What only the torch backend has: two ways to attend, any dtype, and the size of its rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decoders import ids_of, random_decoder, relative_error, run_chunks

from llm.backend import span_attention
from llm.backend.base import StepItem, StepPlan
from vlm.loading import load_backend


@pytest.mark.parametrize(
    "name", ["llama_group3_llama3_rope", "mistral_sliding", "qwen2_sliding_upper_layers"]
)
def test_padded_and_looped_decode_attention_agree(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = random_decoder(tmp_path, name)
    backend = load_backend(path, num_blocks=24, backend="torch")
    lengths = (3, 16, 17, 70)
    items = []
    for i, length in enumerate(lengths):
        table = tuple(range(23 - 6 * i, 17 - 6 * i, -1))
        prompt = ids_of(i, length)
        if length > 1:
            backend.execute(StepPlan((StepItem(tuple(prompt[:-1]), 0, table, 0),)))
        items.append(StepItem((prompt[-1],), length - 1, table, 1))
    # A prefill between them takes its own way in both.
    plan = StepPlan((*items[:2], StepItem(tuple(ids_of(9, 5)), 0, (0,), 2), *items[2:]))
    padded = backend.execute(plan)
    monkeypatch.setattr(span_attention, "PADDED_ELEMENTS", 0)
    assert relative_error(backend.execute(plan), padded) <= 2e-6


def test_consecutive_and_scattered_blocks_give_equal_logits(tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    backend = load_backend(path, num_blocks=12, backend="torch")
    ids = ids_of(0, 90)
    slices = run_chunks(backend, ids, (4, 5, 6, 7, 8, 9), [50, 39, 1])
    gathered = run_chunks(backend, ids, (4, 1, 6, 0, 9, 2), [50, 39, 1])
    assert relative_error(gathered, slices) <= 2e-6


def test_rounding_between_chunkings_and_batches_is_measured_and_small(tmp_path: Path) -> None:
    """Greedy text of the reference path can differ only where two logits are closer than this."""
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    backend = load_backend(path, num_blocks=24, backend="torch")
    ids = ids_of(5, 96)
    table = (0, 1, 2, 3, 4, 5)
    whole = run_chunks(backend, ids, table, [96])
    chunked = run_chunks(backend, ids, table, [1, 31, 32, 20, *[1] * 12])
    crowd = [StepItem(tuple(ids_of(i, 40)), 0, (6 + 3 * i, 7 + 3 * i, 8 + 3 * i), 0) for i in range(5)]
    batched = backend.execute(StepPlan((*crowd, StepItem(tuple(ids), 0, table, 96))))
    differences = [float(np.abs(other - whole).max()) for other in (chunked, batched)]
    print(f"max |difference| chunked {differences[0]:.1e}, batched {differences[1]:.1e}")
    assert max(differences) <= 2e-5 * np.abs(whole).max()
    np.testing.assert_array_equal(chunked.argmax(1), whole.argmax(1))
    np.testing.assert_array_equal(batched.argmax(1), whole.argmax(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_through_chunks_and_swaps(tmp_path: Path, dtype: str) -> None:
    path, _ = random_decoder(tmp_path, "qwen3_attention_bias")
    backend = load_backend(path, num_blocks=8, backend="torch", dtype=dtype)
    ids = ids_of(0, 40)
    exact = run_chunks(load_backend(path, num_blocks=8, backend="torch"), ids, (0, 1, 2), [40])
    got = run_chunks(backend, ids, (0, 1, 2), [20, 19, 1])
    assert got.dtype == np.float32
    assert relative_error(got, exact) <= 6e-2
    backend.swap_in(backend.swap_out((0, 1)), (5, 6))
    tail = backend.execute(StepPlan((StepItem(tuple(ids[32:]), 32, (5, 6, 7), 8),)))
    assert relative_error(tail, exact[32:]) <= 6e-2
