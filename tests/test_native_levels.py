"""The native library by level of x86-64: chosen by what the CPU lists, shipped or compiled, and on each level
a row's result is independent of the batch around it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from decoders import ids_of, random_decoder, relative_error, run_chunks

from llm.backend import native_build
from llm.backend.base import StepItem, StepPlan
from llm.backend.native_build import LEVELS, NativeUnavailable, load_library, why_unavailable
from vlm.loading import load_backend

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
HERE = native_build.levels()
V2, V3, V4 = (LEVELS[f"x86-64-v{i}"] for i in (2, 3, 4))


@pytest.fixture
def use_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes this process take one level for the CPU's best, compiled from the source beside it."""

    def use(level: str) -> None:
        load_library.cache_clear()
        monkeypatch.setattr(native_build, "levels", lambda: [level])
        monkeypatch.setattr(native_build, "shipped", lambda: None)

    yield use
    load_library.cache_clear()


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (frozenset(), None),
        (V2 - {"sse4_2"}, None),
        (V2, "x86-64-v2"),
        (V2 | V3 - {"fma"}, "x86-64-v2"),
        (V2 | V4, "x86-64-v2"),
        (V2 | V3, "x86-64-v3"),
        (V2 | V3 | V4 - {"avx512vl"}, "x86-64-v3"),
        (V2 | V3 | V4, "x86-64-v4"),
    ],
)
def test_a_cpu_runs_the_levels_whose_features_it_lists(
    flags: frozenset[str], best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "cpu_flags", lambda: flags)
    found = native_build.levels()
    assert found == [] if best is None else found[0] == best
    assert found == [level for level in LEVELS if level in found]


def test_a_cpu_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "cpu_flags", lambda: V2 - {"ssse3"})
    assert why_unavailable() == "the native backend needs a CPU with ssse3"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose library answers one question, with libraries of every level shipped."""
    source = tmp_path / "native.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(native_build, "SOURCE", source)
    monkeypatch.setattr(native_build, "SHIPPED", tmp_path / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    assert len(native_build.ship()) == len(LEVELS)
    yield tmp_path
    load_library.cache_clear()


@pytest.mark.parametrize(
    ("flags", "level"), [(V2, "x86-64-v2"), (V2 | V3, "x86-64-v3"), (V2 | V3 | V4, "x86-64-v4")]
)
def test_the_best_shipped_library_is_taken_without_a_compiler(
    flags: frozenset[str], level: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "cpu_flags", lambda: flags)
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    found = native_build.shipped()
    assert found is not None and level in found.name
    assert load_library().answer() == 42
    assert not (package / "cache").exists()


def test_a_lower_level_stands_in_for_one_that_was_not_shipped(package: Path) -> None:
    best = native_build.shipped()
    assert best is not None
    best.unlink()
    found = native_build.shipped()
    assert (found is None) == (len(HERE) == 1) and (found is None or HERE[1] in found.name)


def test_an_edited_source_is_compiled_and_never_served_by_an_older_library(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "native.cpp").write_text('extern "C" int answer() { return 43; }')
    assert native_build.shipped() is None
    assert load_library().answer() == 43
    load_library.cache_clear()
    monkeypatch.setattr(native_build, "compiler", lambda: None)
    with pytest.raises(NativeUnavailable, match="needs a C"):
        load_library()
    with pytest.raises(NativeUnavailable, match="needs a C"):
        native_build.ship()


LANES = """
#include "native_lanes.h"
extern "C" {
void widen_halves(const F16* p, float* out) { store16(out, load16(p)); }
void widen_bytes(const int8_t* p, float* out) { store16(out, load16(p)); }
void narrow(const float* x, F16* halves, BF16* brains) {
    for (int i = 0; i < 16; i++) { store1(halves, i, x[i]); store1(brains, i, x[i]); }
}
void widen_brains(const BF16* p, float* out) { store16(out, load16(p)); }
void exponentials(const float* x, float* out) { store8(out, exp8(load8(x))); }
void visible(const float* x, float* out, int first, int lo, int hi) {
    store8(out, between8(load8(x), first, lo, hi));
}
void nibbles(const uint32_t* p, float* out) {
    store16(out, nibble16<0>(words16(p))); store16(out + 16, nibble16<3>(words16(p)));
    store16(out + 32, nibble16<7>(words16(p)));
}
float sum(const float* x) { return sum8(load8(x)); }
float largest(const float* x) { return largest8(load8(x)); }
}
"""


@pytest.fixture(scope="module", params=HERE)
def lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("lanes")
    header = native_build.SOURCE.with_name("native_lanes.h")
    (folder / header.name).write_bytes(header.read_bytes())
    (folder / "lanes.cpp").write_text(LANES)
    program = native_build.compiler()
    assert program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "SOURCE", folder / "lanes.cpp")
        native_build._compile(program, request.param, folder / "lanes.so")
    library = ctypes.CDLL(str(folder / "lanes.so"))
    library.sum.restype = library.largest.restype = ctypes.c_float
    return library


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def widened(function: Callable[..., object], values: np.ndarray) -> np.ndarray:
    out = np.empty(values.size, np.float32)
    for i in range(0, values.size, 16):
        function(at(values[i:]), at(out[i:]))
    return out


def test_every_half_and_every_byte_is_read_as_it_is(lanes: ctypes.CDLL) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    want = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(widened(lanes.widen_halves, halves), want)
    bytes_ = np.arange(-128, 128).astype(np.int8)
    np.testing.assert_array_equal(widened(lanes.widen_bytes, bytes_), bytes_.astype(np.float32))


def test_floats_are_rounded_to_the_nearest_half_and_brain_float(lanes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    halves = np.arange(31 << 10, dtype=np.uint16).view(np.float16).astype(np.float64)  # all finite ones
    halfway = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    edges = np.float32([0, -0.0, 65519.996, 65520, -65520, 1e30, np.inf, -np.inf, np.nan, 6e-8, 2e-8, -1e-45])
    with np.errstate(all="ignore"):
        near = np.concatenate(
            [np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(np.inf))]
        )
        values = np.concatenate([bits.view(np.float32), halfway, near, edges])
        values = np.ascontiguousarray(np.concatenate([values, np.zeros(-values.size % 16, np.float32)]))
        want = values.astype(np.float16)
    stored, brains = np.empty(values.size, np.uint16), np.empty(values.size, np.uint16)
    for i in range(0, values.size, 16):
        lanes.narrow(at(values[i:]), at(stored[i:]), at(brains[i:]))
    np.testing.assert_array_equal(stored.view(np.float16), want)
    import torch

    brain = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(widened(lanes.widen_brains, brains), brain)


def test_nibbles_sums_and_windows(lanes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, 16, dtype=np.uint32)
    out = np.empty(48, np.float32)
    lanes.nibbles(at(words), at(out))
    want = [((words >> (4 * j) & 15).astype(np.int32) ^ 8) - 8 for j in (0, 3, 7)]
    np.testing.assert_array_equal(out.reshape(3, 16), np.float32(want))
    x = rng.normal(size=8).astype(np.float32)
    assert lanes.sum(at(x)) == pytest.approx(float(x.sum()), rel=1e-5)
    assert lanes.largest(at(x)) == x.max()
    shown = np.empty(8, np.float32)
    for first, lo, hi in ((0, 0, 8), (0, 3, 6), (8, 10, 12), (16, 0, 3), (0, -5, 4), (24, 30, 99)):
        lanes.visible(at(x), at(shown), first, lo, hi)
        key = first + np.arange(8)
        np.testing.assert_array_equal(shown, np.where((key >= lo) & (key < hi), x, -np.inf))


def test_exponentials_are_right_to_a_few_units_in_the_last_place(lanes: ctypes.CDLL) -> None:
    x = np.linspace(-87, 88, 1 << 14, dtype=np.float32)
    out = np.empty_like(x)
    for i in range(0, x.size, 8):
        lanes.exponentials(at(x[i:]), at(out[i:]))
    want = np.exp(x.astype(np.float64))
    assert float(np.max(np.abs(out - want) / want)) < 4 * 2.0**-23
    edge = np.float32([0, -88, -98, -104, -120, -1e9, -np.inf, 0])
    lanes.exponentials(at(edge), at(out))
    assert out[:8].tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


STORAGES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "float16"), ("int4", "int8")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize(("weights", "kv"), STORAGES)
def test_a_row_is_bitwise_the_same_alone_and_in_a_crowd_on_every_level(
    level: str, weights: str, kv: str, tmp_path: Path, use_level: Callable[[str], None]
) -> None:
    use_level(level)
    path, _ = random_decoder(tmp_path, "llama_yarn_odd_sizes")
    backend = load_backend(path, num_blocks=60, backend="native", weights=weights, kv=kv)
    rng = np.random.default_rng(0)
    ids, order = ids_of(0, 100), rng.permutation(60).tolist()
    alone = run_chunks(backend, ids, tuple(order[:8]), [99, 1])
    np.testing.assert_array_equal(
        run_chunks(backend, ids, tuple(order[:8]), [1, 2, 3, 4, 5, 7, 40, 38]), alone
    )
    for crowd in (1, 2, 3, 4, 6, 11):
        items = []
        for i in range(crowd):
            chunk = int(rng.integers(1, 40))
            table = tuple(order[8 + i * 4 : 12 + i * 4])
            items.append(StepItem(tuple(ids_of(i + 1, chunk)), 0, table, 1))
        items.insert(crowd // 2, StepItem((ids[99],), 99, tuple(order[:8]), 1))
        logits = backend.execute(StepPlan(tuple(items)))
        np.testing.assert_array_equal(logits[crowd // 2], alone[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", HERE)
def test_every_level_agrees_with_torch_and_v4_with_v3_bitwise(
    level: str, tmp_path: Path, use_level: Callable[[str], None]
) -> None:
    path, _ = random_decoder(tmp_path, "qwen3_qk_norm_wide_head")
    ids, table = ids_of(1, 100), tuple(range(8))
    want = run_chunks(load_backend(path, num_blocks=8, backend="torch"), ids, table, [100])
    use_level(level)
    found = run_chunks(load_backend(path, num_blocks=8, backend="native"), ids, table, [60, 39, 1])
    assert relative_error(found, want) <= 1e-5
    if level == "x86-64-v4":
        use_level("x86-64-v3")
        for weights, kv in STORAGES:
            other = load_backend(path, num_blocks=8, backend="native", weights=weights, kv=kv)
            use_level("x86-64-v4")
            mine = load_backend(path, num_blocks=8, backend="native", weights=weights, kv=kv)
            use_level("x86-64-v3")
            np.testing.assert_array_equal(
                *(run_chunks(backend, ids, table, [1, 2, 5, 92]) for backend in (other, mine))
            )
