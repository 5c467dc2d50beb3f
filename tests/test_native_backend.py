"""What the native backend promises beyond the contract: bitwise batch invariance, lossless 16-bit storage,
agreement with torch, and a build that is made once and refused clearly."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from decoders import CONFIGS, ids_of, random_decoder, relative_error, run_chunks
from fidelity import DEFAULT_MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm.backend import native_build
from llm.backend.base import StepItem, StepPlan
from llm.backend.native import NativeBackend
from llm.backend.native_build import NativeUnavailable, load_library, why_unavailable
from llm.backend.torch_backend import TorchBackend
from vlm.checkpoint import Checkpoint
from vlm.loading import load_backend, load_weights

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SETTINGS = settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_torch_and_any_chunking_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, name)
    table = tuple(np.random.default_rng(0).permutation(16).tolist())
    ids = ids_of(1, 200)
    native = load_backend(path, num_blocks=16, backend="native")
    want = run_chunks(load_backend(path, num_blocks=16, backend="torch"), ids, table, [200])
    whole = run_chunks(native, ids, table, [200])
    error = relative_error(whole, want)
    print(f"{name}: native against torch, max rel {error:.1e}")
    assert error <= 1e-5
    np.testing.assert_array_equal(run_chunks(native, ids, table, [1, 2, 3, 4, 5, 6, 7, 13, 100, 59]), whole)
    np.testing.assert_array_equal(run_chunks(native, ids, table, [150, *[1] * 50]), whole)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    path, _ = random_decoder(tmp_path_factory.mktemp("decoder"), "llama_group3_llama3_rope")
    config = Checkpoint.read(path).decoder
    return NativeBackend(config, load_weights(path), num_blocks=130)


@SETTINGS
@given(
    others=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40)), max_size=12),
    place=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_a_row_is_bitwise_the_same_alone_and_in_any_crowd(
    native: NativeBackend, others: list[tuple[int, int]], place: int, seed: int
) -> None:
    """One sequence decodes while up to 12 others prefill and decode beside it."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(130).tolist()
    ids = ids_of(seed, 100)
    alone = run_chunks(native, ids, tuple(order[:10]), [99, 1])[-1]
    items = []
    for i, (length, chunk) in enumerate(others):
        chunk = min(chunk, length)
        table = tuple(order[10 + i * 10 : 20 + i * 10])
        prompt = ids_of(seed + i + 1, length)
        if length > chunk:
            native.execute(StepPlan((StepItem(tuple(prompt[: length - chunk]), 0, table, 0),)))
        logits = int(rng.integers(0, chunk + 1))
        items.append(StepItem(tuple(prompt[length - chunk :]), length - chunk, table, logits))
    place = min(place, len(items))
    items.insert(place, StepItem((ids[99],), 99, tuple(order[:10]), 1))
    row = sum(item.num_logits for item in items[:place])
    np.testing.assert_array_equal(native.execute(StepPlan(tuple(items)))[row], alone)


def test_a_bfloat16_checkpoint_is_stored_in_half_the_bytes_without_a_difference() -> None:
    config = Checkpoint.read(DEFAULT_MODEL).decoder
    weights = load_weights(DEFAULT_MODEL)
    small = NativeBackend(config, weights, num_blocks=8)
    wide = NativeBackend(config, weights, num_blocks=8, weight_storage="float32")
    assert small.weight_bytes * 2 == wide.weight_bytes
    ids = ids_of(0, 100)
    logits = [run_chunks(b, ids, tuple(range(8)), [60, 30, *[1] * 10]) for b in (small, wide)]
    np.testing.assert_array_equal(*logits)
    np.testing.assert_array_equal(small.embedding(), wide.embedding())


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 4e-2), ("float16", 5e-3)])
def test_16_bit_storage_stays_within_its_rounding(tmp_path: Path, dtype: str, bound: float) -> None:
    """Relative rounding is 2^-9 and 2^-12; three layers add some of it up."""
    path, _ = random_decoder(tmp_path, "llama_yarn_odd_sizes")
    ids = ids_of(0, 100)
    exact, rounded = (
        run_chunks(load_backend(path, num_blocks=8, dtype=d, backend="native"), ids, tuple(range(8)), [100])
        for d in ("float32", dtype)
    )
    assert 0 < relative_error(rounded, exact) <= bound
    again = load_backend(path, num_blocks=8, dtype=dtype, backend="native")
    np.testing.assert_array_equal(run_chunks(again, ids, tuple(range(8)), [40, 7, 50, 1, 1, 1]), rounded)


def test_a_broken_sequence_leaves_its_neighbours_alone(native: NativeBackend) -> None:
    """NaN rows of one sequence, in blocks that another one takes over, reach no other logits."""
    ids = ids_of(0, 20)
    want = run_chunks(native, ids, (0, 1), [20])
    from llm.backend.base import VisualSlice

    nan = np.full((20, native.config.d_model), np.nan, np.float32)
    poisoned = StepItem(tuple(ids), 0, (2, 3), 1, (VisualSlice(0, nan),))
    together = native.execute(StepPlan((poisoned, StepItem(tuple(ids), 0, (0, 1), 20))))
    assert np.isnan(together[0]).all()
    np.testing.assert_array_equal(together[1:], want)
    np.testing.assert_array_equal(run_chunks(native, ids, (2, 3), [20]), want)
    short = run_chunks(native, ids[:5], (3,), [5])
    np.testing.assert_array_equal(short, want[:5])


def test_blocks_of_several_pages_give_the_same_bits(tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, "qwen3_qk_norm_wide_head")
    ids = ids_of(3, 150)
    small = load_backend(path, num_blocks=10, block_size=16, backend="native")
    large = load_backend(path, num_blocks=4, block_size=48, backend="native")
    want = run_chunks(small, ids, tuple(range(10)), [150])
    np.testing.assert_array_equal(run_chunks(large, ids, (2, 0, 3, 1), [70, 80]), want)
    handle = large.swap_out((2, 0))
    large.swap_in(handle, (1, 3))
    tail = StepItem(tuple(ids[90:96]), 90, (1, 3), 6)
    np.testing.assert_array_equal(large.execute(StepPlan((tail,))), want[90:96])


def test_auto_takes_native_here_and_torch_with_one_notice_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    assert isinstance(load_backend(path, num_blocks=1), NativeBackend)
    assert isinstance(load_backend(path, num_blocks=1, backend="torch"), TorchBackend)
    load_library.cache_clear()
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_backend(path, num_blocks=1), TorchBackend)
    assert [r.getMessage() for r in caplog.records] == [
        "the native backend needs a C++ compiler (g++); torch takes its place"
    ]
    with pytest.raises(NativeUnavailable):
        load_backend(path, num_blocks=1, backend="native")
    monkeypatch.undo()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_backend(path, num_blocks=1, block_size=8), TorchBackend)
    assert "multiple of 16" in caplog.text


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    return tmp_path / "vlm"


@pytest.mark.slow
def test_the_library_is_compiled_once_per_source(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()
    (built,) = fresh_cache.glob("*.so")
    load_library.cache_clear()
    monkeypatch.setattr(native_build, "_compile", lambda *_: pytest.fail("compiled again"))
    load_library()
    assert [built] == list(fresh_cache.iterdir())
    load_library.cache_clear()


def test_a_cache_that_others_may_write_is_not_trusted(fresh_cache: Path) -> None:
    fresh_cache.mkdir()
    fresh_cache.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="others"):
        load_library()


@pytest.mark.parametrize("source", ["this is not C++", "#error no"])
def test_a_source_that_does_not_compile_leaves_no_file(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text(source)
    monkeypatch.setattr(native_build, "SOURCE", broken)
    with pytest.raises(NativeUnavailable, match="refused"):
        load_library()
    assert list(fresh_cache.iterdir()) == []
