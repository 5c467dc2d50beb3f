"""What every backend owes the engine, run over all of them and several shapes of decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import execute, random_decoder, relative_error, run_chunks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm.backend.base import Backend, StepItem, StepPlan, VisualSlice
from llm.backend.ragged import PlanError
from vlm.loading import load_backend

BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "native": {"backend": "native"},
    "triton": {"backend": "torch", "attention": "triton"},  # interpreted, some hundred times as slow
}
SHAPES = ("llama_group3_llama3_rope", "llama_yarn_odd_sizes", "qwen3_attention_bias", "mistral_sliding")
INTERPRETED = ("mistral_sliding",)  # the others' ropes and norms are not the kernel's
NUM_BLOCKS = 24
VOCAB = 160
BOUND = 1e-5  # max |difference| / max |reference| between two ways to compute the same logits
SETTINGS = settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(
    scope="module",
    params=[(b, s) for b in BACKENDS for s in (INTERPRETED if b == "triton" else SHAPES)],
    ids="-".join,
)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    kind, shape = request.param
    path, _ = random_decoder(tmp_path_factory.mktemp("decoder"), shape)
    return load_backend(path, num_blocks=NUM_BLOCKS, block_size=16, **BACKENDS[kind])


def ids_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.manual_seed(seed)).tolist()


def assert_same(backend: Backend, got: np.ndarray, want: np.ndarray) -> None:
    """Bitwise where the backend promises that, else within BOUND."""
    if getattr(backend, "batch_invariant", False):
        np.testing.assert_array_equal(got, want)
    else:
        assert relative_error(got, want) <= BOUND


def test_a_step_counts_its_progress_from_inside_at_least_once_a_layer(backend: Backend) -> None:
    ticks = np.zeros(1, np.int64)
    backend.count_progress(ticks)
    num_layers = backend.config.num_layers  # type: ignore[attr-defined]
    for step, chunk in enumerate((20, 1)):
        item = StepItem(tuple(ids_of(step, chunk)), 20 * step, (0, 1), 1)
        backend.execute(StepPlan((item,)))
        assert ticks[0] >= (step + 1) * num_layers


@SETTINGS
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_any_batching_and_chunking_gives_the_logits_of_each_sequence_alone(
    backend: Backend, lengths: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(NUM_BLOCKS).tolist()
    prompts = [ids_of(seed + i, n) for i, n in enumerate(lengths)]
    want = [run_chunks(backend, p, tuple(order[:6]), [len(p)]) for p in prompts]
    tables = [tuple(order[6 * i : 6 * i + 6]) for i in range(len(lengths))]
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        items, expected = [], []
        for i, prompt in enumerate(prompts):
            left = lengths[i] - done[i]
            size = int(rng.choice([0, min(left, 1), left, rng.integers(0, left + 1)]))
            if size:
                logits = int(rng.integers(0, size + 1))
                chunk = tuple(prompt[done[i] : done[i] + size])
                items.append(StepItem(chunk, done[i], tables[i], logits))
                done[i] += size
                expected.append(want[i][done[i] - logits : done[i]])
        if items:
            got = execute(backend, StepPlan(tuple(items)))
            assert got.dtype == np.float32
            assert got.shape == (sum(item.num_logits for item in items), backend.vocab_size)
            if len(got):
                assert_same(backend, got, np.concatenate(expected))


def test_visual_rows_take_their_tokens_place(backend: Backend) -> None:
    ids = ids_of(0, 40)
    embedding = torch.as_tensor(backend_embedding(backend))
    replaced = [*ids[:10], *ids_of(9, 8), *ids[18:]]
    rows = embedding[torch.tensor(replaced[10:18])]
    want = run_chunks(backend, replaced, (0, 1, 2), [40])
    visuals = (VisualSlice(10, rows[:3]), VisualSlice(13, rows[3:]))
    got = execute(backend, StepPlan((StepItem(tuple(ids), 0, (5, 3, 4), 40, visuals),)))
    assert_same(backend, got, want)


def backend_embedding(backend: Backend) -> np.ndarray:
    """float32 [vocab, d_model]."""
    return backend.embedding()  # type: ignore[attr-defined]


def test_a_copied_block_continues_like_the_original(backend: Backend) -> None:
    ids = ids_of(1, 50)
    want = run_chunks(backend, ids, (0, 1, 2, 3), [40, 10])
    tail = StepItem(tuple(ids[40:]), 40, (0, 7, 8, 9), 10)
    got = execute(backend, StepPlan((tail,), copies=((1, 7), (2, 8))))
    assert_same(backend, got, want[40:])


def test_swapped_out_blocks_come_back_elsewhere(backend: Backend) -> None:
    ids = ids_of(2, 50)
    want = run_chunks(backend, ids, (0, 1, 2, 3), [40, 10])
    handle = backend.swap_out((0, 1, 2))
    run_chunks(backend, ids_of(3, 60), (2, 1, 0, 3), [60])  # others write where it was
    backend.swap_in(handle, (9, 4, 20))
    got = execute(backend, StepPlan((StepItem(tuple(ids[40:]), 40, (9, 4, 20, 5), 10),)))
    assert_same(backend, got, want[40:])
    with pytest.raises(ValueError, match="as many blocks"):
        backend.swap_in(handle, (1, 2))


def test_a_plan_without_items_or_logits_returns_no_rows(backend: Backend) -> None:
    assert execute(backend, StepPlan(())).shape == (0, backend.vocab_size)
    assert execute(backend, StepPlan((), copies=((0, 1),))).shape == (0, backend.vocab_size)
    item = StepItem((1, 2, 3), 0, (0,), 0)
    assert execute(backend, StepPlan((item,))).shape == (0, backend.vocab_size)


BAD_ITEMS = {
    "negative token": StepItem((1, -1), 0, (0,), 1),
    "token beyond the vocabulary": StepItem((10_000,), 0, (0,), 1),
    "no token": StepItem((), 0, (0,), 0),
    "more logits than tokens": StepItem((1,), 0, (0,), 2),
    "negative start": StepItem((1,), -1, (0,), 1),
    "table too short": StepItem((1, 2), 15, (0,), 1),
    "block outside": StepItem((1,), 0, (NUM_BLOCKS,), 1),
    "negative block": StepItem((1,), 0, (-1,), 1),
    "beyond the positions": StepItem((1,), 10_000, tuple(range(NUM_BLOCKS)) * 40, 1),
    "rows outside the chunk": StepItem((1, 2), 0, (0,), 1, (VisualSlice(1, np.zeros((2, 64), np.float32)),)),
    "rows of another width": StepItem((1, 2), 0, (0,), 1, (VisualSlice(0, np.zeros((1, 8), np.float32)),)),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_plan_out_of_bounds_is_refused_and_changes_nothing(backend: Backend, name: str) -> None:
    ids = ids_of(4, 20)
    want = run_chunks(backend, ids, (0, 1), [20])
    good = StepItem(tuple(ids_of(5, 20)), 0, (0, 1), 1)
    with pytest.raises(PlanError):
        backend.execute(StepPlan((good, BAD_ITEMS[name])))
    with pytest.raises(PlanError):
        backend.execute(StepPlan((good,), copies=((0, NUM_BLOCKS),)))
    got = execute(backend, StepPlan((StepItem(tuple(ids[16:]), 16, (0, 1), 4),)))
    assert_same(backend, got, want[16:])


def test_equal_plans_give_equal_bits(backend: Backend) -> None:
    ids = ids_of(6, 70)
    first = run_chunks(backend, ids, (0, 1, 2, 3, 4), [70])
    np.testing.assert_array_equal(run_chunks(backend, ids, (0, 1, 2, 3, 4), [70]), first)


def test_the_pool_is_sized_by_bytes(tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    per_block = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, head_dim, positions, bytes
    for kind in BACKENDS:
        assert load_backend(path, kv_bytes=per_block * 5 + 3, **BACKENDS[kind]).num_blocks == 5
        with pytest.raises(ValueError, match="no block"):
            load_backend(path, kv_bytes=per_block - 1, **BACKENDS[kind])
