"""Weights in 8 and 4 bits and KV in 8 bits: against plain torch on the multiplied-out numbers, in any batch,
and through everything that moves blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import CONFIGS, ids_of, random_decoder, relative_error, run_chunks
from fake_backend import ByteTokens, Harness, prompt_of, request_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from llm.backend.base import Backend, StepItem, StepPlan
from llm.backend.decoder import DecoderWeights
from llm.backend.kv_pool import quantise_heads
from llm.backend.native import NativeBackend
from llm.backend.native_build import why_unavailable
from llm.backend.quantise import quantise_int4, quantise_int8
from llm.backend.torch_backend import TorchBackend
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.request import Prompt
from vlm.checkpoint import Checkpoint
from vlm.loading import load_backend, load_weights

needs_native = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SETTINGS = settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KINDS = [("native", "float32"), ("native", "int8"), ("native", "int4"), ("torch", "auto")]


def dequantise_int8(values: Tensor, scale: Tensor) -> Tensor:
    return values.to(torch.float32) * scale[:, None]


def dequantise_int4(values: Tensor, scale: Tensor, k: int) -> Tensor:
    """float32 [n, k], exact: an integer of 4 bits times a bfloat16 scale."""
    return (values.to(torch.float32) * scale[..., None]).flatten(1)[:, :k]


def random_weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.manual_seed(seed)) * 0.1


# ---- the numbers ---------------------------------------------------------------------------------------


@SETTINGS
@given(n=st.integers(1, 40), k=st.integers(1, 100), seed=st.integers(0, 99))
def test_int8_errs_by_half_a_step_of_its_row(n: int, k: int, seed: int) -> None:
    weight = random_weight(n, k, seed)
    values, scale = quantise_int8(weight)
    error = (dequantise_int8(values, scale) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()


def grouped(weight: Tensor) -> Tensor:
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))


@SETTINGS
@given(n=st.integers(1, 40), k=st.integers(1, 100), seed=st.integers(0, 99))
def test_int4_errs_by_an_eighth_of_its_groups_largest_at_most(n: int, k: int, seed: int) -> None:
    """-8..7: what has the other sign than the largest may miss by a whole step; in the mean squared."""
    weight = random_weight(n, k, seed)
    values, scale = quantise_int4(weight)
    assert int(values.min()) >= -8 and int(values.max()) <= 7
    assert torch.equal(scale, scale.to(torch.bfloat16).to(torch.float32))
    restored = dequantise_int4(values, scale, k)
    assert restored.shape == weight.shape
    error = grouped(restored - weight).square().mean(2).sqrt()
    assert (error <= grouped(weight).abs().amax(2) / 8 * 1.01).all()


def test_the_searched_scale_errs_less_than_the_largest_values() -> None:
    weight = random_weight(64, 256)
    groups = grouped(weight)
    step = groups.abs().amax(2, keepdim=True) / 7
    plain = ((groups / step).round() * step - groups).square().sum()
    searched = (dequantise_int4(*quantise_int4(weight), 256) - weight).square().sum()
    assert searched < 0.85 * plain


def test_rows_of_zeros_and_single_values_come_back() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 40] = -0.25
    weight[2] = 1e-30
    assert torch.equal(dequantise_int8(*quantise_int8(weight))[:2], weight[:2])
    assert torch.equal(dequantise_int4(*quantise_int4(weight), 64)[:2], weight[:2])
    assert dequantise_int4(*quantise_int4(weight), 64).isfinite().all()


@SETTINGS
@given(dim=st.integers(1, 128), size=st.floats(1e-20, 1e20), seed=st.integers(0, 99))
def test_a_cached_head_errs_by_half_a_step_of_its_largest(dim: int, size: float, seed: int) -> None:
    x = torch.randn(7, dim, generator=torch.manual_seed(seed)) * size
    values, scale = quantise_heads(x)
    error = (values * scale[:, None] - x).abs()
    assert (error <= x.abs().amax(1, keepdim=True) / 127 * 0.5001).all()
    assert int(values.abs().max()) <= 127


def test_a_cached_head_that_is_no_number_is_not_read_as_one() -> None:
    x = torch.ones(3, 4)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    values, scale = quantise_heads(x)
    assert scale.isnan().tolist() == [True, True, False]
    assert values[2].tolist() == [127] * 4


# ---- the backends --------------------------------------------------------------------------------------


def multiplied_out(weights: DecoderWeights, storage: str) -> DecoderWeights:
    """What the kernels compute with, in float32."""

    def body(w: Tensor) -> Tensor:
        if storage == "int8":
            return dequantise_int8(*quantise_int8(w))
        return dequantise_int4(*quantise_int4(w), w.shape[1])

    layers = tuple(
        replace(w, qkv=body(w.qkv), out=body(w.out), gate_up=body(w.gate_up), down=body(w.down))
        for w in weights.layers
    )
    head = dequantise_int8(*quantise_int8(weights.lm_head))
    embedding = weights.embedding.to(torch.bfloat16).to(torch.float32)
    return replace(weights, embedding=embedding, layers=layers, lm_head=head)


@needs_native
@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gemma3_two_ropes_four_norms", "llama_gqa2"])
def test_token_embeddings_keep_sixteen_bits_beside_a_quantised_head_also_one_that_is_tied_to_them(
    name: str, storage: Any, tmp_path: Path
) -> None:
    path, _ = random_decoder(tmp_path, name)
    table = load_weights(path).embedding
    kept = load_backend(path, num_blocks=8, backend="native", weights=storage)
    assert torch.equal(torch.from_numpy(kept.embedding()), table.to(torch.bfloat16).float())  # type: ignore[attr-defined]
    assert kept._embedding.nbytes == 2 * table.numel()  # type: ignore[attr-defined]
    exact = load_backend(path, num_blocks=8, backend="native", weights="float32")
    assert torch.equal(torch.from_numpy(exact.embedding()), table)  # type: ignore[attr-defined]


@needs_native
@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_layers_equal_torch_on_the_multiplied_out_weights(
    name: str, storage: str, tmp_path: Path
) -> None:
    """Chunks of every path: one row, a few, two tiles of rows, many."""
    path, _ = random_decoder(tmp_path, name)
    config = Checkpoint.read(path).decoder
    ids, table = ids_of(1, 120), tuple(range(8))
    reference = TorchBackend(config, multiplied_out(load_weights(path), storage), num_blocks=8)
    want = run_chunks(reference, ids, table, [120])
    native = load_backend(path, num_blocks=8, backend="native", weights=storage)
    whole = run_chunks(native, ids, table, [120])
    assert relative_error(whole, want) <= 1e-5
    chunks = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 30, 29]
    np.testing.assert_array_equal(run_chunks(native, ids, table, chunks), whole)


@needs_native
@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_inputs_beyond_one_pass_of_the_caches_are_summed_in_the_same_order(
    storage: str, tmp_path: Path
) -> None:
    """2100 inputs: a pass of 2048, then a block that is cut short inside a word."""
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    narrow = Checkpoint.read(path).decoder
    weights, config = load_weights(path), replace(narrow, d_ff=2100)
    wide = {"gate_up": random_weight(4200, 64, 1), "down": random_weight(64, 2100, 2)}
    weights = replace(weights, layers=tuple(replace(layer, **wide) for layer in weights.layers))
    ids, table = ids_of(5, 100), tuple(range(8))
    reference = TorchBackend(config, multiplied_out(weights, storage), num_blocks=8)
    native = NativeBackend(config, weights, num_blocks=8, weight_storage=storage)  # type: ignore[arg-type]
    whole = run_chunks(native, ids, table, [100])
    assert relative_error(whole, run_chunks(reference, ids, table, [100])) <= 1e-5
    np.testing.assert_array_equal(run_chunks(native, ids, table, [1, 2, 6, 11, 20, 60]), whole)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """With an int8 cache."""
    kind, weights = request.param
    if kind == "native" and why_unavailable():
        pytest.skip(str(why_unavailable()))
    path, _ = random_decoder(tmp_path_factory.mktemp("decoder"), "llama_group3_llama3_rope")
    return load_backend(path, num_blocks=130, backend=kind, weights=weights, kv="int8")


def assert_same(backend: Backend, got: np.ndarray, want: np.ndarray) -> None:
    """Bitwise on the native backend. Torch sums in other orders in other batches, so that an element of the
    cache may round to the next of 127 steps, and the layers above spread that."""
    if getattr(backend, "batch_invariant", False):
        np.testing.assert_array_equal(got, want)
    else:
        assert relative_error(got, want) <= 1e-2


@SETTINGS
@given(
    others=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40)), max_size=12),
    place=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_a_row_is_the_same_alone_and_in_any_crowd(
    backend: Backend, others: list[tuple[int, int]], place: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(130).tolist()
    ids = ids_of(seed, 100)
    alone = run_chunks(backend, ids, tuple(order[:10]), [99, 1])[-1]
    items = []
    for i, (length, chunk) in enumerate(others):
        chunk, table, prompt = min(chunk, length), tuple(order[10 + i * 10 : 20 + i * 10]), ids_of(i, length)
        if length > chunk:
            backend.execute(StepPlan((StepItem(tuple(prompt[: length - chunk]), 0, table, 0),)))
        items.append(StepItem(tuple(prompt[length - chunk :]), length - chunk, table, 1))
    place = min(place, len(items))
    items.insert(place, StepItem((ids[99],), 99, tuple(order[:10]), 1))
    assert_same(backend, backend.execute(StepPlan(tuple(items)))[place], alone)


def test_copies_and_swaps_carry_the_scales(backend: Backend) -> None:
    ids = ids_of(2, 50)
    want = run_chunks(backend, ids, (0, 1, 2, 3), [40, 10])
    tail = tuple(ids[40:])
    copied = StepPlan((StepItem(tail, 40, (0, 7, 8, 9), 10),), copies=((1, 7), (2, 8)))
    assert_same(backend, backend.execute(copied), want[40:])
    handle = backend.swap_out((0, 1, 2))
    run_chunks(backend, [i * 3 % 160 for i in range(60)], (2, 1, 0, 3), [60])  # others write where it was
    backend.swap_in(handle, (9, 4, 20))
    assert_same(backend, backend.execute(StepPlan((StepItem(tail, 40, (9, 4, 20, 5), 10),))), want[40:])
    with pytest.raises(ValueError, match="as many blocks"):
        backend.swap_in(handle, (1, 2))


@needs_native
@pytest.mark.parametrize("name", ["llama_gqa2", "llama_yarn_odd_sizes", "mistral_sliding", "llama_mqa8_bias"])
def test_backends_agree_on_an_int8_cache_and_it_errs_little(name: str, tmp_path: Path) -> None:
    path, _ = random_decoder(tmp_path, name)
    ids, table, chunks = ids_of(3, 120), (3, 0, 7, 5, 1, 2, 4, 6), [50, 1, 2, 47, 20]
    exact, torch_int8, native_int8 = (
        run_chunks(load_backend(path, num_blocks=8, backend=kind, kv=kv), ids, table, chunks)  # type: ignore[arg-type]
        for kind, kv in (("torch", "float32"), ("torch", "int8"), ("native", "int8"))
    )
    agree, lost = relative_error(native_int8, torch_int8), relative_error(native_int8, exact)
    print(f"{name}: native against torch {agree:.1e}, int8 against float32 {lost:.1e}")
    assert agree <= 1e-2  # single elements round to the next of 127 steps
    assert 0 < lost <= 5e-2


@needs_native
def test_a_broken_sequence_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    from llm.backend.base import VisualSlice

    path, _ = random_decoder(tmp_path, "llama_gqa2")
    backend = load_backend(path, num_blocks=6, backend="native", weights="int8", kv="int8")
    ids = ids_of(0, 20)
    want = run_chunks(backend, ids, (0, 1), [20])
    nan = np.full((20, 64), np.nan, np.float32)
    poisoned = StepItem(tuple(ids), 0, (2, 3), 1, (VisualSlice(0, nan),))
    together = backend.execute(StepPlan((poisoned, StepItem(tuple(ids), 0, (0, 1), 20))))
    assert np.isnan(together[0]).all()
    np.testing.assert_array_equal(together[1:], want)
    np.testing.assert_array_equal(run_chunks(backend, ids[:5], (3,), [5]), want[:5])


def engine_answers(backend: Backend, prompts: dict[str, Prompt], **settings: Any) -> tuple[Harness, Any]:
    """Token ids of every prompt, asked together, two times."""
    harness = Harness(tokens=ByteTokens((b"x",) * 160))
    harness.backend = backend  # type: ignore[assignment]
    harness.engine = Engine(
        backend, harness.visuals, EngineConfig(step_stretch=None, **settings), harness.tokens, frozenset()
    )
    for turn in ("a", "b"):
        for name, prompt in prompts.items():
            harness.submit(request_of(f"{turn}-{name}", prompt, max_tokens=40))
        harness.run()
    harness.assert_clean()
    return harness, [{n: harness.answer(f"{turn}-{n}").token_ids for n in prompts} for turn in ("a", "b")]


@needs_native
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_engine_answers_are_the_same_cold_warm_and_preempted(preemption: str, tmp_path: Path) -> None:
    """On an int8 cache: each alone without a prefix cache, then all at once in a pool that is too small."""
    path, _ = random_decoder(tmp_path, "llama_gqa2")
    large, small = (
        load_backend(path, num_blocks=blocks, backend="native", weights="int4", kv="int8")
        for blocks in (40, 11)
    )
    prompts = {f"r{i}": prompt_of(ids_of(0, 40) + ids_of(i, 9 + 7 * i)) for i in range(1, 5)}
    want = {}
    for name, prompt in prompts.items():
        harness, (cold, again) = engine_answers(large, {name: prompt}, prefix_cache=False)
        assert cold == again
        want |= cold
    harness, both = engine_answers(small, prompts, preemption=preemption)
    assert both == [want, want]
    stats = harness.engine.stats()
    assert (stats.preempted_swap if preemption == "swap" else stats.preempted_recompute) > 0
    assert sum(f.usage.cached_tokens for f in harness.finished.values() if f.usage) > 0
