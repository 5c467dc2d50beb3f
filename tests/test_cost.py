"""Bytes, FLOPs and times: what has to hold for every shape."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from article_formulas import speculation_pays, swap_is_cheaper
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.cost import (
    Chunk,
    CostError,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    attention_flops,
    decode_time,
    decode_work,
    inference_ledger,
    kv_bytes,
    kv_bytes_per_token,
    kv_capacity_bytes,
    kv_copies,
    kv_share,
    make_swap_rule,
    max_batch,
    parallel_decode_time,
    prefill_time,
    prefill_work,
    recompute_seconds,
    step_time,
    step_work,
    swap_seconds,
    weights_read,
)

GPU = Machine("gpu", 1e14, 1e12, 80_000_000_000, host_bandwidth=5e10, link_bandwidth=4e11)
quick = settings(deadline=None, max_examples=60)


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    layers, head_dim = draw(st.integers(1, 12)), draw(st.sampled_from([16, 32, 64]))
    config = {
        "model_type": "llama",
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw(st.integers(32, 512)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": draw(st.integers(64, 2048)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return DecoderShape.from_config(config)


SHAPE = DecoderShape(
    num_layers=4, d_model=256, num_heads=8, num_kv_heads=2, head_dim=32, num_params=3_000_000, vocab_size=1000
)
SLIDING = replace(SHAPE, num_sliding_layers=3, sliding_window=64)
LINEAR = replace(SHAPE, num_linear_layers=3, linear_state=4096)
MLA = replace(SHAPE, num_kv_heads=8, latent_dim=64, rope_dim=16)
EXPERTS = replace(SHAPE, num_experts=16, experts_per_token=2, expert_params=100_000)
ODD_SHAPES = [SHAPE, SLIDING, LINEAR, MLA, EXPERTS]


@quick
@given(shapes(), st.integers(1, 5000), st.sampled_from([1, 2, 4]), st.integers(1, 64))
def test_kv_bytes_round_up_to_whole_blocks(shape: DecoderShape, n: int, element: int, block: int) -> None:
    exact, paged = kv_bytes(shape, n, element), kv_bytes(shape, n, element, block)
    assert exact == n * kv_bytes_per_token(shape, element)
    assert exact <= paged < exact + block * kv_bytes_per_token(shape, element)
    assert paged % (block * kv_bytes_per_token(shape, element)) == 0


@quick
@given(shapes(), st.integers(1, 300), st.integers(1, 300))
def test_prefill_in_two_chunks_is_the_whole_prefill_but_for_the_weights(
    shape: DecoderShape, first: int, second: int
) -> None:
    whole = step_work(shape, [Chunk(first + second, 0, 1)])
    parts = [step_work(shape, [Chunk(first, 0, 0)]), step_work(shape, [Chunk(second, first, 1)])]
    assert sum(part.flops for part in parts) == pytest.approx(whole.flops)
    assert sum(part.weight_bytes for part in parts) == pytest.approx(2 * whole.weight_bytes)


@quick
@given(shapes(), st.integers(1, 64), st.integers(1, 2000))
def test_decode_work_is_the_step_of_its_chunks(shape: DecoderShape, batch: int, context: int) -> None:
    chunks = step_work(shape, [Chunk(1, context - 1)] * batch)
    closed = decode_work(shape, batch, context)
    assert closed.flops == pytest.approx(chunks.flops)
    assert closed.weight_bytes == pytest.approx(chunks.weight_bytes)
    assert closed.kv_bytes == pytest.approx(chunks.kv_bytes)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_decode_work_is_the_step_of_its_chunks_for_every_kind(shape: DecoderShape) -> None:
    chunks, closed = step_work(shape, [Chunk(1, 99)] * 7), decode_work(shape, 7, 100)
    assert (closed.flops, closed.num_bytes) == pytest.approx((chunks.flops, chunks.num_bytes))


@quick
@given(shapes(), st.integers(1, 200))
def test_attention_flops_count_causal_pairs(shape: DecoderShape, n: int) -> None:
    pairs = sum(i + 1 for i in range(n))
    width = shape.num_heads * shape.head_dim
    assert attention_flops(shape, n, 0) == 4 * shape.num_layers * width * pairs


def test_a_window_bounds_pairs_traffic_and_cache() -> None:
    one_by_one = sum(min(i + 1, 64) for i in range(200))
    full = sum(i + 1 for i in range(200))
    per_pair = 4 * SHAPE.num_heads * SHAPE.head_dim
    assert attention_flops(SLIDING, 200, 0) == per_pair * (3 * one_by_one + full)
    assert kv_bytes(SLIDING, 10_000) == kv_bytes(SHAPE, 10_000) // 4 + 3 * (kv_bytes(SHAPE, 64) // 4)
    assert decode_work(SLIDING, 1, 10_000).kv_bytes < decode_work(SHAPE, 1, 10_000).kv_bytes / 3


def test_a_linear_layer_keeps_a_state_and_no_cache() -> None:
    state = 3 * 4096 * 4
    assert kv_bytes(LINEAR, 1000) - state == kv_bytes(SHAPE, 1000) // 4
    assert kv_bytes(LINEAR, 0) == 0
    assert kv_bytes_per_token(LINEAR) == kv_bytes_per_token(SHAPE) / 4


def test_a_latent_cache_is_on_every_rank() -> None:
    assert kv_bytes_per_token(MLA) == 4 * (64 + 16) * 2
    assert kv_share(MLA, 8) == 1.0 and kv_copies(MLA, 8) == 8
    assert kv_share(SHAPE, 2) == 0.5 and kv_share(SHAPE, 8) == 0.5 and kv_copies(SHAPE, 8) == 4


def test_uneven_ranks_are_judged_by_the_fullest() -> None:
    three = replace(SHAPE, num_heads=9, num_kv_heads=3)
    assert kv_share(three, 2) == pytest.approx(2 / 3)


def test_more_tokens_read_more_experts_but_never_more_than_all() -> None:
    read = [weights_read(EXPERTS, n) for n in (1, 4, 64, 10_000)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(EXPERTS.active_params)
    assert read[-1] == pytest.approx(EXPERTS.num_params)


def test_a_table_that_is_only_looked_up_is_neither_read_nor_multiplied() -> None:
    untied = replace(SHAPE, embed_params=256_000, head_params=256_000)
    assert step_work(untied, [Chunk(10, 0, 0)]).weight_bytes == 2 * (3_000_000 - 256_000)
    body = attention_flops(untied, 10, 0) + 2 * 10 * (3_000_000 - 512_000)
    assert step_work(untied, [Chunk(10, 0, 0)]).flops == body
    assert step_work(untied, [Chunk(10, 0, 3)]).flops == body + 2 * 3 * 256_000
    assert untied.lumped() == SHAPE


@quick
@given(shapes(), st.integers(1, 32), st.integers(1, 4000))
def test_the_ledger_is_what_fits(shape: DecoderShape, sequences: int, context: int) -> None:
    small = replace(GPU, memory_bytes=2_000_000_000, workspace_bytes=100_000_000)
    most = max_batch(shape, small, context)
    ledger = inference_ledger(shape, most, context, workspace_bytes=small.workspace_bytes)
    assert ledger.total - ledger.activations <= small.memory_bytes
    over = inference_ledger(shape, most + 1, context, workspace_bytes=small.workspace_bytes)
    assert over.total - over.activations > small.memory_bytes


def test_nothing_fits_beside_weights_that_do_not_fit() -> None:
    tiny = replace(GPU, memory_bytes=1_000_000)
    assert max_batch(SHAPE, tiny, 100) == 0 and kv_capacity_bytes(SHAPE, tiny) == 0


@quick
@given(shapes(), st.integers(1, 3000), st.floats(1e11, 1e15), st.floats(1e9, 1e13))
def test_a_step_is_bound_by_its_longest_term(
    shape: DecoderShape, n: int, peak: float, bandwidth: float
) -> None:
    machine = replace(GPU, peak_flops=peak, bandwidth=bandwidth)
    step = prefill_time(shape, machine, n)
    assert step.seconds == max(step.compute_s, step.bandwidth_s)
    assert (step.binds == "compute") == (step.compute_s >= step.bandwidth_s)
    slow = replace(machine, step_overhead_s=10 * step.seconds)
    assert prefill_time(shape, slow, n).binds == "overhead"
    assert prefill_time(shape, slow, n).seconds == pytest.approx(11 * step.seconds)


def test_many_slow_collectives_bind() -> None:
    slow = replace(GPU, collective_s=1e-2)
    step = parallel_decode_time(SHAPE, slow, 1, 100, parallel=Parallel(tensor=2))
    assert step.binds == "communication"
    assert step.latency_s == pytest.approx(2 * SHAPE.num_layers * 1e-2)


def test_a_pipeline_does_not_speed_up_a_token() -> None:
    alone = decode_time(SHAPE, GPU, 1, 500)
    piped = parallel_decode_time(SHAPE, GPU, 1, 500, parallel=Parallel(pipeline=4))
    assert piped.seconds >= alone.seconds
    assert max_batch(SHAPE, GPU, 500, parallel=Parallel(pipeline=4)) > 3.9 * max_batch(SHAPE, GPU, 500)


def test_spreading_experts_divides_what_a_device_reads() -> None:
    alone = parallel_decode_time(EXPERTS, GPU, 64, 10)
    spread = parallel_decode_time(EXPERTS, GPU, 64, 10, parallel=Parallel(expert=4))
    assert spread.bandwidth_s < alone.bandwidth_s
    assert spread.latency_s > 0 and spread.payload_s > 0


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        (SHAPE, {"tensor": 16}),
        (SHAPE, {"pipeline": 5}),
        (SHAPE, {"expert": 2}),
        (EXPERTS, {"expert": 17}),
        (SHAPE, {"tensor": 0}),
        (EXPERTS, {"expert": 2, "tensor": 2}),
    ],
)
def test_impossible_splits_are_refused(shape: DecoderShape, parallel: dict[str, int]) -> None:
    with pytest.raises(CostError):
        parallel_decode_time(shape, GPU, 1, 10, parallel=Parallel(**parallel))


def test_swap_or_recompute_goes_by_the_smaller_time() -> None:
    for host in (1e8, 1e9, 1e10, 1e11, 1e12):
        machine = replace(GPU, host_bandwidth=host)
        swap, again = swap_seconds(SHAPE, machine, 2000), recompute_seconds(SHAPE, machine, 2000)
        assert swap_is_cheaper(SHAPE, machine, 2000) == (swap < again)
        assert swap == pytest.approx(2 * kv_bytes(SHAPE, 2000) / host)
    assert swap_is_cheaper(SHAPE, replace(GPU, host_bandwidth=1e13), 2000)
    assert not swap_is_cheaper(SHAPE, replace(GPU, host_bandwidth=1e6), 2000)
    assert not swap_is_cheaper(SHAPE, replace(GPU, host_bandwidth=0), 2000)


def test_shared_blocks_make_both_cheaper() -> None:
    assert recompute_seconds(SHAPE, GPU, 2000, 1900) < recompute_seconds(SHAPE, GPU, 2000)
    assert recompute_seconds(SHAPE, GPU, 2000, 2000) == 0.0
    assert not swap_is_cheaper(SHAPE, GPU, 2000, 2000)


def test_the_engines_swap_rule_counts_blocks() -> None:
    rule = make_swap_rule(SHAPE, GPU, block_size=16)
    assert rule(2000, 125) == swap_is_cheaper(SHAPE, GPU, 2000)
    assert not rule(1, 10_000)


def test_speculation_pays_up_to_the_ridge() -> None:
    at = int(GPU.ridge())  # 100 rows
    assert speculation_pays(at // 5, 4, GPU) and not speculation_pays(at // 5 + 1, 4, GPU)
    assert speculation_pays(at // 5 + 1, 4, GPU, Precision(4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chunk(0),
        lambda: Chunk(1, -1),
        lambda: Chunk(1, 0, 2),
        lambda: Precision(0),
        lambda: Precision(2, 2, 4),
        lambda: Machine("m", 0, 1, 1),
        lambda: replace(GPU, compute_efficiency=1.5),
        lambda: kv_bytes(SHAPE, -1),
        lambda: step_work(SHAPE, []),
        lambda: decode_work(SHAPE, 0, 1),
        lambda: prefill_work(SHAPE, 5, 5),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(CostError):
        make()


def test_a_cached_working_set_streams_faster() -> None:
    machine = replace(GPU, cache_bytes=1e9, cache_bandwidth=5e12)
    assert decode_time(SHAPE, machine, 1, 10).bandwidth_s < decode_time(SHAPE, GPU, 1, 10).bandwidth_s


def test_a_mixed_step_takes_both_its_parts() -> None:
    decodes = [Chunk(1, 100)] * 8
    mixed = step_time(SHAPE, GPU, [*decodes, Chunk(500)])
    assert mixed.compute_s > step_time(SHAPE, GPU, [Chunk(500)]).compute_s
    assert mixed.bandwidth_s > step_time(SHAPE, GPU, decodes).bandwidth_s


def test_the_cost_core_loads_no_torch() -> None:
    code = "import sys, llm.cost, encoder.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
