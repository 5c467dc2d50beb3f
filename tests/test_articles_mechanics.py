"""Every figure of "The Mechanics of LLM Inference" that its formulas give, with its rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from article_formulas import (
    crossover_tokens,
    decode_wall,
    gemm_intensity,
    padding_waste,
    quadratic_prompt_tokens,
    speculation_pays,
    training_ledger,
)
from figures import shows

from encoder.geometry import VisionGeometry
from llm.cost import (
    Chunk,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    activation_bytes,
    batch_at_ridge,
    decode_time,
    decode_work,
    distinct_experts,
    expected_tokens,
    kv_bytes,
    kv_bytes_per_token,
    kv_copies,
    kv_elements_per_layer,
    linear_flops,
    logits_bytes,
    max_batch,
    parallel_decode_time,
    prefill_time,
    prefill_work,
    speculation_speedup,
    step_time,
    step_work,
    weight_bytes,
)
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.labs import roofline
from vlm.plan.labs.image_lab import plan_image, with_encoder, with_pooling
from vlm.plan.simulation.workload import ARTICLE_REQUESTS

GB, KIB = 1e9, 1024
H100 = load_machine("h100")


def decoder(name: str) -> DecoderShape:
    """The articles' accounting: every parameter multiplies every token."""
    return load_model(name).decoder.lumped()


LLAMA_8B, MHA_7B = decoder("llama-3-8b"), decoder("7b-mha")


def test_table_1_flops_per_parameter_per_token() -> None:
    without_attention = linear_flops(LLAMA_8B, 1, 1)
    inference = without_attention / LLAMA_8B.num_params
    backward = 2 * inference  # gradients of inputs and of weights
    assert (inference + backward, inference) == (6.0, 2.0)


TABLE_2 = [
    ("llama-2-7b", 32, 32, 128, 512, "4.29", "17.2", "68.7"),
    ("llama-3-8b", 32, 8, 128, 128, "1.07", "4.29", "17.2"),
    ("mistral-7b", 32, 8, 128, 128, "1.07", "4.29", "17.2"),
    ("llama-3.1-70b", 80, 8, 128, 320, "2.68", "10.7", "42.9"),
    ("7b-mha", 32, 32, 128, 512, "4.29", "17.2", "68.7"),
]


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim", "kib", "at_8k", "at_32k", "at_128k"), TABLE_2
)
def test_table_2_every_row_and_context(
    name: str, layers: int, kv_heads: int, head_dim: int, kib: int, at_8k: str, at_32k: str, at_128k: str
) -> None:
    shape = decoder(name)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (layers, kv_heads, head_dim)
    assert kv_bytes_per_token(shape) == kib * KIB
    for context, figure in ((8192, at_8k), (32768, at_32k), (131072, at_128k)):
        assert shows(kv_bytes(shape, context) / GB, figure)


def test_full_context_of_llama_2_7b_outweighs_the_model_and_the_card() -> None:
    cache, weights = kv_bytes(decoder("llama-2-7b"), 131072), weight_bytes(decoder("llama-2-7b"))
    assert cache > 5 * weights
    assert cache > H100.memory_bytes - weights


def test_one_layer_two_regimes() -> None:
    assert shows(gemm_intensity(8192, 4096, 4096), "1638")
    assert shows(gemm_intensity(1, 4096, 4096), "1.0")
    assert shows(1 / H100.ridge() * 100, "0.3")  # percent of the roof
    assert shows((1 - 1 / H100.ridge()) * 100, "99.7")
    assert shows(1 / H100.ridge() * 100, "0.34")


def test_prefill_of_8192_tokens() -> None:
    work = prefill_work(LLAMA_8B, 8192)
    linear = linear_flops(LLAMA_8B, 8192, 1)
    assert shows(linear / 1e14, "1.32")
    assert shows((work.flops - linear) / 1e13, "1.76")
    assert shows(work.flops / 1e12, "149")
    step = prefill_time(LLAMA_8B, H100, 8192)
    assert step.binds == "compute"
    assert shows(step.seconds * 1e3, "335")
    assert shows(step.seconds / 8192 * 1e6, "41")


def test_one_decode_step_at_8k() -> None:
    work, step = decode_work(LLAMA_8B, 1, 8192), decode_time(LLAMA_8B, H100, 1, 8192)
    linear = linear_flops(LLAMA_8B, 1, 1)
    assert shows(linear / 1e10, "1.61") and shows((work.flops - linear) / 1e9, "4.29")
    assert shows(work.flops / 1e9, "20.4")
    assert shows(work.weight_bytes / GB, "16.1") and shows(work.kv_bytes / GB, "1.07")
    assert step.binds == "bandwidth"
    assert shows(step.seconds * 1e3, "5.1")
    rate = work.flops / step.seconds
    assert shows(rate / 1e12, "4.0") and shows(rate / H100.peak_flops * 100, "0.40")


def test_the_step_bytes_are_the_sum_of_rounded_terms() -> None:
    """Printed as 17.2 GB = 16.1 + 1.07; the unrounded sum is 17.13."""
    exact = decode_work(LLAMA_8B, 1, 8192).num_bytes
    assert shows(16.1 + 1.07, "17.2")
    assert shows(exact / GB, "17.1") and not shows(exact / GB, "17.2")


def test_a_decoded_token_costs_125_prompt_tokens() -> None:
    prompt_token = prefill_time(LLAMA_8B, H100, 8192).seconds / 8192
    assert shows(decode_time(LLAMA_8B, H100, 1, 8192).seconds / prompt_token, "125")


def test_what_the_cache_saves() -> None:
    prompt, output = 1000, 500
    without = sum(linear_flops(LLAMA_8B, prompt + t, 1) for t in range(1, output + 1))
    closed_form = linear_flops(LLAMA_8B, 1, 1) * (output * prompt + output**2 / 2)
    cached = linear_flops(LLAMA_8B, prompt + output, 1)
    assert without == pytest.approx(closed_form, rel=1e-3)
    assert shows(closed_form / 1e16, "1.0") and shows(cached / 1e13, "2.4")
    assert shows(closed_form / cached, "417")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intensity"), [(32, 32, 1), (32, 8, 4), (64, 8, 8), (32, 1, 32)]
)
def test_group_size_is_the_intensity_of_decode_attention(heads: int, kv_heads: int, intensity: int) -> None:
    shape = replace(LLAMA_8B, num_heads=heads, num_kv_heads=kv_heads)
    assert roofline.long_context_intensity(shape) == pytest.approx(intensity)
    assert intensity == 2 * (shape.num_heads // shape.num_kv_heads) / 2


def test_mla_against_gqa() -> None:
    latent, gqa = kv_elements_per_layer(decoder("deepseek-v2")), kv_elements_per_layer(LLAMA_8B)
    assert (latent, gqa) == (576, 2048)
    assert shows(gqa / latent, "3.6")
    assert kv_bytes_per_token(decoder("deepseek-v2")) == 60 * 576 * 2


def test_logits_and_transients() -> None:
    vocab_128k = replace(LLAMA_8B, vocab_size=128_000)
    assert shows(logits_bytes(vocab_128k, 256) / 1e6, "131")
    assert shows(logits_bytes(LLAMA_8B, 256) / 1e6, "131")
    assert shows(logits_bytes(LLAMA_8B, 8192) / GB, "4.2")
    assert activation_bytes(replace(LLAMA_8B, intermediate_size=14336), 256, 0) < 10e6


def test_table_3_training() -> None:
    ledger = training_ledger(7_000_000_000)
    assert (ledger.weights, ledger.master, ledger.moments) == (14 * GB, 28 * GB, 56 * GB)
    assert ledger.gradients == (14 * GB, 28 * GB)
    low, high = ledger.total
    assert shows(low / GB, "125", step="5") and shows(high / GB, "190")
    assert shows(low / ledger.weights, "9")  # "roughly nine times the weights"


def test_table_3_inference_cache_belongs_to_a_gqa_model() -> None:
    """Table 3 is a 7B model's, and 1.07 GB is what eight KV heads need; full MHA needs four times that."""
    assert shows(kv_bytes(LLAMA_8B, 8192) / GB, "1.07") and shows(
        kv_bytes(decoder("mistral-7b"), 8192) / GB, "1.07"
    )
    assert shows(kv_bytes(MHA_7B, 8192) / GB, "4.29")
    nominal = replace(MHA_7B, num_params=7_000_000_000)
    assert weight_bytes(nominal) == 14 * GB  # with 1 GB of workspace: 15


@pytest.mark.parametrize(
    ("name", "tokens", "conversations"), [("llama-3-8b", "122,500", 15), ("7b-mha", "25,700", 3)]
)
def test_where_the_cache_overtakes_the_model(name: str, tokens: str, conversations: int) -> None:
    crossover = crossover_tokens(decoder(name))
    assert shows(crossover, tokens)
    assert round(crossover / 8192) == conversations


def test_the_decode_wall() -> None:
    assert shows(decode_wall(LLAMA_8B, H100), "209")
    assert shows(1e3 / decode_wall(LLAMA_8B, H100), "4.8")
    wall = decode_wall(LLAMA_8B, H100)
    assert shows(100 / wall * 100, "50", step="5") and shows(140 / wall * 100, "65", step="5")


def test_the_wall_moves_with_the_conversation() -> None:
    short, long = (decode_time(LLAMA_8B, H100, 1, n).seconds for n in (1, 131072))
    assert shows(kv_bytes(LLAMA_8B, 131072) / GB, "17.2")
    assert long > 2 * short


@pytest.mark.parametrize(("machine", "figure"), [("h100", "295"), ("a100", "153"), ("l40s", "419")])
def test_b_star(machine: str, figure: str) -> None:
    assert shows(batch_at_ridge(load_machine(machine)), figure)


def test_fp8_does_not_move_b_star() -> None:
    twice = replace(H100, peak_flops_8bit=2 * H100.peak_flops)
    assert batch_at_ridge(twice, Precision(1, 2, 8)) == batch_at_ridge(twice, Precision(2, 2, 16))


TABLE_4 = [
    (2048, "0.27", "60", "63.8", "21.6", "12,500"),
    (8192, "1.07", "15", "19.0", "6.4", "3,120"),
    (32768, "4.29", "3.7", "7.7", "2.6", "780"),
    (131072, "17.2", "0.9", "4.9", "1.7", "195"),
]


@pytest.mark.parametrize(("context", "kv", "cross", "ceiling", "percent", "rate"), TABLE_4)
def test_table_4_every_row(context: int, kv: str, cross: str, ceiling: str, percent: str, rate: str) -> None:
    intensity = roofline.intensity_ceiling(LLAMA_8B, context)
    assert shows(kv_bytes(LLAMA_8B, context) / GB, kv)
    assert shows(roofline.batch_cross(LLAMA_8B, context), cross, step=None if "." in cross else "1")
    assert shows(intensity, ceiling)
    assert shows(intensity / H100.ridge() * 100, percent)
    assert shows(roofline.throughput_ceiling(LLAMA_8B, H100, context), rate)


def test_the_ceiling_of_a_gqa_4_model() -> None:
    assert shows(roofline.long_context_intensity(LLAMA_8B) / H100.ridge() * 100, "1.4")
    assert decode_work(LLAMA_8B, 10_000, 1 << 22).intensity < 4.1


def test_an_fp8_cache_doubles_capacity_and_ceiling() -> None:
    eight = Precision(kv_bytes=1)
    assert roofline.long_context_intensity(LLAMA_8B, eight) == 2 * roofline.long_context_intensity(LLAMA_8B)
    assert max_batch(LLAMA_8B, H100, 8192, eight) in (115, 2 * max_batch(LLAMA_8B, H100, 8192))
    assert decode_work(LLAMA_8B, 1, 8192, eight).kv_bytes * 2 == decode_work(LLAMA_8B, 1, 8192).kv_bytes


def test_b_max() -> None:
    assert max_batch(LLAMA_8B, H100, 8192) == 57  # 2 GB of workspace


def test_littles_law() -> None:
    assert roofline.littles_law(20, 4) == 80


def test_four_bit_weights() -> None:
    four = Precision(weight_bytes=0.5)
    assert shows(weight_bytes(LLAMA_8B, 2) / GB, "16.1") and shows(weight_bytes(LLAMA_8B, 0.5) / GB, "4")
    assert shows(1e3 / decode_wall(LLAMA_8B, H100, four), "1.2")
    assert shows(1e3 / decode_wall(LLAMA_8B, H100), "4.8")
    prefill = prefill_time(LLAMA_8B, H100, 8192, precision=four)
    assert prefill.seconds == prefill_time(LLAMA_8B, H100, 8192).seconds  # compute-bound: nothing gained


def test_speculation() -> None:
    assert shows(expected_tokens(0.8, 4), "3.36")
    assert shows(speculation_speedup(0.8, 4, 0.05), "2.8")
    assert (8 * (4 + 1), 64 * (4 + 1)) == (40, 320)
    assert speculation_pays(8, 4, H100) and not speculation_pays(64, 4, H100)


def test_verification_reads_what_decoding_reads() -> None:
    plain = step_work(LLAMA_8B, [Chunk(1, 8191)])
    verify = step_work(LLAMA_8B, [Chunk(5, 8191, 5)])
    assert verify.weight_bytes == plain.weight_bytes
    assert verify.kv_bytes == pytest.approx(plain.kv_bytes, rel=1e-3)
    assert verify.flops == pytest.approx(5 * plain.flops, rel=1e-3)


@pytest.mark.parametrize(
    ("n", "bytes_ms", "total_ms", "gain"),
    [(2, "2.40", "2.78", "1.7"), (4, "1.20", "1.58", "3.0"), (8, "0.60", "0.98", "4.9")],
)
def test_tensor_parallelism(n: int, bytes_ms: str, total_ms: str, gain: str) -> None:
    one = parallel_decode_time(LLAMA_8B, H100, 1, 1)
    split = parallel_decode_time(LLAMA_8B, H100, 1, 1, parallel=Parallel(tensor=n))
    assert shows(one.seconds * 1e3, "4.79")
    assert shows(split.bandwidth_s * 1e3, bytes_ms) and shows(split.latency_s * 1e3, "0.38")
    assert shows(split.seconds * 1e3, total_ms)
    assert shows(one.seconds / split.seconds, gain)
    assert shows(split.latency_s / H100.collective_s, "64")  # "64 small collectives"


def test_sixteen_ranks_hold_two_copies_of_eight_kv_heads() -> None:
    assert kv_copies(LLAMA_8B, 16) == 2 and kv_copies(LLAMA_8B, 8) == 1


@pytest.mark.parametrize(("batch", "figure"), [(1, "2"), (4, "5.5"), (16, "7.9")])
def test_distinct_experts(batch: int, figure: str) -> None:
    assert shows(distinct_experts(8, 2, batch), figure)


def test_patch_tokens_and_the_cost_of_one_image() -> None:
    geometry = VisionGeometry(384, 14, 2)
    assert geometry.patches_per_tile == 729
    assert geometry.num_patches(geometry.squares(13)) == 9477
    image, question = kv_bytes(MHA_7B, 2370), kv_bytes(MHA_7B, 30)
    assert shows(image / GB, "1.24") and shows(question / 1e6, "15.7")
    assert shows(image / question, "80")
    assert shows(padding_waste([13] + [1] * 200), "0.92")


def test_a_quarter_of_the_patches_against_integer_pooling() -> None:
    """2,370 is 9,477 / 4; pooling 27x27 by 2x2 gives whole cells: 14x14 with ceil, 13x13 with floor."""
    geometry = VisionGeometry(384, 14, 2)
    assert shows(9477 / 4, "2,370")
    assert geometry.rows(geometry.squares(13)) == 13 * 14 * 14 == 2548
    assert 13 * (27 // 2) ** 2 == 2197


def test_the_two_extremes() -> None:
    model = load_model("7b-mha")
    assert model.tower is not None
    dense = with_pooling(model.tower, 1)
    assert dense.geometry.rows(dense.geometry.squares(25)) == 18_225
    sparse = with_encoder(with_pooling(model.tower, 16), 224, 14)
    heavy = plan_image(MHA_7B, dense, H100, [dense.geometry.squares(25)])
    light = plan_image(MHA_7B, sparse, H100, [sparse.geometry.squares(13)])
    assert heavy.ttft_s > 10 * light.ttft_s


def test_preprocessing_of_13_tiles_is_15_6_ms() -> None:
    """Printed as 15 ms; 1.2 ms a tile, the lab's own assumption, makes 15.6."""
    tower = load_model("7b-mha").tower
    assert tower is not None
    plan = plan_image(MHA_7B, tower, H100, [tower.geometry.squares(13)])
    assert shows(plan.preprocess_s * 1e3, "15.6")


def test_vit_flops_imply_a_nominal_400m_tower() -> None:
    """8.4 TFLOP follows from P = 400M; the tower's blocks and patch embedding hold 412M, which makes 8.7."""
    exact = load_model("7b-mha").tower
    assert exact is not None
    no_connector = replace(exact, d_model=0)
    nominal = replace(no_connector, nominal_params=400_000_000)
    tiles = exact.geometry.squares(13)
    assert shows(nominal.flops(tiles) / 1e12, "8.4")
    assert shows(nominal.flops(tiles) / (H100.peak_flops * H100.tower_efficiency) * 1e3, "21")
    attention = nominal.flops(tiles) - 2 * 400e6 * 9477
    assert shows((8.4e12 - attention) / (2 * 9477) / 1e6, "398")  # what the rounded figure implies
    assert shows(exact.patch_params / 1e6, "412") and shows(no_connector.flops(tiles) / 1e12, "8.7")


def test_prefill_flops_imply_7_31e9_parameters_or_attention_that_is_not_halved() -> None:
    """36.6 TFLOP for 2,400 tokens: causal attention leaves P = 7.31e9; with P = 7.0e9 it takes 4LN^2d."""
    linear = linear_flops(MHA_7B, 2400, 1)
    causal = prefill_work(MHA_7B, 2400).flops - linear
    assert shows((36.6e12 - causal) / (2 * 2400) / 1e9, "7.31")
    assert shows((2 * 7.0e9 * 2400 + 2 * causal) / 1e12, "36.6")
    assert shows((linear + causal) / 1e12, "33.9")  # what Llama-2-7B's sizes give
    assert shows(36.6e12 / (H100.peak_flops * H100.compute_efficiency) * 1e3, "82")
    assert 15 + 21 + 82 == 118


def test_text_alone_takes_the_weights_read_and_not_1_ms() -> None:
    """1 ms is 30 tokens' arithmetic; the weights' read takes 4 ms."""
    step = prefill_time(MHA_7B, H100, 30)
    assert shows(step.compute_s * 1e3, "1", step="1")
    assert step.binds == "bandwidth" and shows(step.seconds * 1e3, "4", step="1")


def test_quadratic_prefill_begins_at_61264_tokens() -> None:
    """Printed as about 53,000: that is what the 6.98e9 parameters outside the two tables give."""
    assert round(quadratic_prompt_tokens(replace(LLAMA_8B, num_params=8_030_000_000))) == 61_264
    tables = load_model("llama-3-8b").decoder
    body = LLAMA_8B.num_params - tables.embed_params - tables.head_params
    assert shows(quadratic_prompt_tokens(replace(LLAMA_8B, num_params=body)), "53,000")


def test_63_gb_free_is_80_less_14_and_3() -> None:
    """63 GB, 50 and 12 conversations need 3 GB of workspace; the lab's 2 GB leave 64.5 GB, 51 and 12."""
    one, four = kv_bytes(MHA_7B, 2370 + 30), kv_bytes(MHA_7B, 4 * 2370 + 30)
    assert 80 - 14 - 3 == 63
    assert (int(63e9 // one), int(63e9 // four)) == (50, 12)
    free = H100.memory_bytes - weight_bytes(MHA_7B) - H100.workspace_bytes
    assert shows(free / GB, "64.5")
    assert (max_batch(MHA_7B, H100, 2400), max_batch(MHA_7B, H100, 9510)) == (51, 12)
    gqa_8 = replace(MHA_7B, num_kv_heads=8)
    assert kv_bytes(MHA_7B, 2400) == 4 * kv_bytes(gqa_8, 2400)  # "four times as many"


def test_295_needs_a_peak_of_989_and_296_one_of_990() -> None:
    """This article divides 989 TFLOP/s by 3.35 TB/s; the third one 990."""
    assert shows(Machine("", 989e12, 3.35e12, 1).ridge(), "295")
    assert shows(Machine("", 990e12, 3.35e12, 1).ridge(), "296")


def test_slot_use_of_the_eight_requests() -> None:
    outputs = [request.output_tokens for request in ARTICLE_REQUESTS]
    prompts = [request.prompt_tokens for request in ARTICLE_REQUESTS]
    assert (len(outputs), sum(outputs), max(outputs), min(outputs)) == (8, 1180, 500, 20)
    assert (min(prompts), max(prompts)) == (128, 8192)
    assert shows(roofline.slot_use(outputs) * 100, "29.5")


def test_a_whole_prefill_stalls_thirty_decodes() -> None:
    decodes = [Chunk(1, 500)] * 30
    stalled = step_time(LLAMA_8B, H100, [*decodes, Chunk(8192)])
    assert shows(decode_time(LLAMA_8B, H100, 1, 8192).seconds * 1e3, "5")
    assert shows(stalled.seconds * 1e3, "340", step="10")
