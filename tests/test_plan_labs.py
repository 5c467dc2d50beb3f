"""The labs: their fields, what binds, and what they warn of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from article_formulas import padding_waste
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.cost import CostError, Parallel, Precision, decode_time, kv_bytes, max_batch, prefill_time
from vlm.plan.catalog import load_machine, load_model, machine_names, model_names
from vlm.plan.labs.batch_lab import plan_batch, render_batch
from vlm.plan.labs.image_lab import plan_image, render_image, with_encoder, with_pooling
from vlm.plan.labs.kv_lab import capacity_curve, plan_kv, render_kv
from vlm.plan.labs.serve_lab import SpeculationGain, Workload, plan_serve, render_serve

H100 = load_machine("h100")
LLAMA = load_model("llama-3-8b").decoder.lumped()
MHA = load_model("7b-mha")
quick = settings(deadline=None, max_examples=40)


def test_lab_1_shows_its_fields_and_flags_what_does_not_fit() -> None:
    plan = plan_kv(LLAMA, H100, 8192, 8)
    text = render_kv(plan, "")
    for field in ("KV per token", "KV per sequence", "KV total", "weights", "device used", "max concurrency"):
        assert field in text
    assert "KV read / decode step" in text
    assert plan.kv_total_bytes == 8 * kv_bytes(LLAMA, 8192) and plan.max_concurrency == 59
    assert plan.binds == "bandwidth"
    full = plan_kv(LLAMA, H100, 8192, 60)
    assert full.device_used > 1 and full.binds == "capacity"


def test_lab_1_precisions_move_one_line_each() -> None:
    plain = plan_kv(LLAMA, H100, 8192, 8)
    cache, weights = (plan_kv(LLAMA, H100, 8192, 8, p) for p in (Precision(2, 1), Precision(1, 2)))
    assert (cache.weight_bytes, cache.kv_total_bytes * 2) == (plain.weight_bytes, plain.kv_total_bytes)
    assert (weights.weight_bytes * 2, weights.kv_total_bytes) == (plain.weight_bytes, plain.kv_total_bytes)


def test_capacity_falls_with_context() -> None:
    curve = capacity_curve(LLAMA, H100, [1024, 4096, 65536, 1 << 20])
    assert curve == sorted(curve, reverse=True) and curve[0] > 0 and curve[-1] == 0


def test_lab_2_composes_its_parts() -> None:
    load = Workload(2048, 256, 16)
    plan = plan_serve(LLAMA, H100, load)
    assert plan.ttft_s == prefill_time(LLAMA, H100, 2048).seconds
    assert plan.tpot_s == decode_time(LLAMA, H100, 16, 2048 + 128).seconds
    assert plan.e2e_s == pytest.approx(plan.ttft_s + 255 * plan.tpot_s)
    assert plan.output_tokens_per_s == pytest.approx(16 * plan.user_tokens_per_s)
    text = render_serve(plan, "")
    for field in (
        "fits?",
        "TTFT",
        "TPOT",
        "E2E latency",
        "output tok/s",
        "per-user",
        "KV share",
        "intensity",
    ):
        assert field in text
    assert (plan.ttft_binds, plan.tpot_binds, plan.binds) == ("compute", "bandwidth", "bandwidth")


def test_lab_2_flags_tensor_parallelism_past_n_kv() -> None:
    eight = plan_serve(LLAMA, H100, Workload(), parallel=Parallel(tensor=8))
    sixteen = plan_serve(LLAMA, H100, Workload(), parallel=Parallel(tensor=16))
    assert eight.kv_copies == 1 and not any("held" in note for note in eight.notes)
    assert sixteen.kv_copies == 2 and any("2 times" in note for note in sixteen.notes)


@pytest.mark.parametrize(
    ("load", "parallel", "binds"),
    [
        (Workload(8192, 16, 500), Parallel(), "capacity"),
        (Workload(2048, 256, 16, rate_per_s=1000), Parallel(), "queue"),
        (Workload(8192, 2, 1), Parallel(), "compute"),
        (Workload(128, 512, 1), Parallel(), "bandwidth"),
        (Workload(128, 512, 1), Parallel(tensor=32), "communication"),
    ],
)
def test_lab_2_says_what_binds(load: Workload, parallel: Parallel, binds: str) -> None:
    assert plan_serve(LLAMA, H100, load, parallel=parallel).binds == binds


def test_lab_2_overhead_binds_a_small_model_on_a_slow_launcher() -> None:
    slow = replace(H100, step_overhead_s=5e-3)
    assert plan_serve(load_model("default").decoder, slow, Workload(128, 64, 1)).binds == "overhead"


def test_goodput_needs_both_limits_and_room_in_the_queue() -> None:
    base = Workload(2048, 256, 16, rate_per_s=2, slo_ttft_s=0.2, slo_tpot_s=0.02)
    assert plan_serve(LLAMA, H100, base).goodput_rps == 2
    assert plan_serve(LLAMA, H100, replace(base, slo_ttft_s=0.01)).goodput_rps == 0
    assert plan_serve(LLAMA, H100, replace(base, slo_tpot_s=0.001)).goodput_rps == 0
    assert plan_serve(LLAMA, H100, replace(base, rate_per_s=1000)).goodput_rps == 0
    plan = plan_serve(LLAMA, H100, base)
    assert plan.concurrency == pytest.approx(2 * plan.e2e_s)


def test_a_cached_prefix_shortens_ttft_alone() -> None:
    cold, warm = (plan_serve(LLAMA, H100, Workload(4096, 64, 4, cached)) for cached in (0, 4000))
    assert warm.ttft_s < cold.ttft_s / 10 and warm.tpot_s == cold.tpot_s


def test_speculation_gains_alone_and_loses_in_a_crowd() -> None:
    few = plan_serve(LLAMA, H100, Workload(512, 256, 1), speculation=SpeculationGain(4))
    many = plan_serve(LLAMA, H100, Workload(512, 256, 128), speculation=SpeculationGain(4, 0.4))
    assert few.speculation_speedup == pytest.approx(2.8, abs=0.02)
    assert many.speculation_speedup < 1 and any("loses" in note for note in many.notes)


def test_weight_only_quantisation_does_nothing_for_prefill() -> None:
    plain = plan_serve(LLAMA, H100, Workload())
    four = plan_serve(LLAMA, H100, Workload(), Precision(0.5))
    eight = plan_serve(LLAMA, H100, Workload(), Precision(1, 1, 8))
    assert four.ttft_s == plain.ttft_s and four.tpot_s < plain.tpot_s
    assert eight.ttft_s == pytest.approx(plain.ttft_s * 989 / 1979)


def test_replicas_add_throughput_and_nothing_else() -> None:
    one, three = (plan_serve(LLAMA, H100, Workload(), parallel=Parallel(replicas=n)) for n in (1, 3))
    assert three.output_tokens_per_s == pytest.approx(3 * one.output_tokens_per_s)
    assert (three.ttft_s, three.tpot_s, three.devices) == (one.ttft_s, one.tpot_s, 3)


def test_lab_3_orders_its_limits() -> None:
    plan = plan_batch(LLAMA, H100, 8192)
    text = render_batch(plan, "")
    for field in ("B* (arithmetic)", "B_cross", "B_max", "I at B_max", "I ceiling", "throughput ceiling"):
        assert field in text
    assert plan.batch_cross < plan.max_batch < plan.batch_at_ridge and plan.binds == "capacity"
    assert plan.max_batch == max_batch(LLAMA, H100, 8192)


@quick
@given(st.integers(64, 100_000), st.sampled_from([1.0, 2.0]))
def test_batching_never_passes_its_ceilings(context: int, kv: float) -> None:
    plan = plan_batch(LLAMA, H100, context, Precision(2, kv))
    rates = [point.tokens_per_s for point in plan.curve]
    users = [point.user_tokens_per_s for point in plan.curve]
    assert rates == sorted(rates) and users == sorted(users, reverse=True)
    assert all(point.tokens_per_s <= plan.throughput_ceiling for point in plan.curve)
    assert all(point.intensity <= plan.intensity_ceiling for point in plan.curve)


def test_lab_4_shows_its_fields_and_its_chain() -> None:
    assert MHA.tower is not None
    plan = plan_image(MHA.decoder.lumped(), MHA.tower, H100, [MHA.tower.geometry.squares(13)])
    text = render_image(plan, "")
    for field in ("patch tokens", "visual tokens", "prompt tokens", "TTFT", "vision share", "KV per request"):
        assert field in text
    assert "concurrent conversations" in text and "vs. text-only prompt" in text
    assert plan.ttft_s == pytest.approx(plan.preprocess_s + plan.encode_s + plan.prefill_s)
    assert plan.prompt_tokens == plan.visual_tokens + 30
    assert plan.kv_per_request_bytes == plan.kv_visual_bytes + plan.kv_text_bytes
    assert plan.warm_ttft_s < plan.prefill_s / 10


@quick
@given(st.lists(st.integers(1, 13), min_size=1, max_size=6), st.sampled_from([1, 4, 9, 16]))
def test_an_image_costs_by_its_tiles(tiles: list[int], pooling: int) -> None:
    assert MHA.tower is not None
    tower = with_pooling(MHA.tower, pooling)
    plan = plan_image(MHA.decoder, tower, H100, [tower.geometry.squares(n) for n in tiles])
    assert plan.visual_tokens == sum(tiles) * tower.geometry.tokens_per_tile
    assert plan.patch_tokens == sum(tiles) * 729
    assert plan.kv_visual_bytes == kv_bytes(MHA.decoder, plan.visual_tokens)
    assert 0 <= padding_waste(tiles) <= 12 / 13 + 1e-9


def test_other_pooling_and_encoders_are_checked() -> None:
    assert MHA.tower is not None
    with pytest.raises(CostError, match="square"):
        with_pooling(MHA.tower, 5)
    with pytest.raises(CostError, match="patch"):
        with_encoder(MHA.tower, 100, 200)


KNOWN_PARAMS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "deepseek-v2": 235_741_434_880,
}
WITH_TOWER = {"smolvlm-256m": 256_484_928, "smolvlm-500m": 507_482_304, "smolvlm-2.2b": 2_246_272_880}


def test_presets_hold_the_published_parameter_counts() -> None:
    for name, params in KNOWN_PARAMS.items():
        assert load_model(name).decoder.num_params == params
    for name, params in WITH_TOWER.items():
        model = load_model(name)
        assert model.tower is not None
        assert model.decoder.num_params + model.tower.num_params == params
    assert 21e9 < load_model("deepseek-v2").decoder.active_params < 21.5e9
    assert 34e9 < load_model("qwen3.6-35b-a3b").decoder.num_params < 36e9


def test_every_preset_plans_on_every_accelerator() -> None:
    for machine in machine_names()[:-2]:  # the last two would be measured
        for model in model_names():
            shape = load_model(model).decoder
            assert plan_kv(shape, load_machine(machine), 4096).kv_per_token_bytes > 0
            plan = plan_serve(shape, load_machine(machine), Workload(512, 32, 1))
            assert plan.fits == (plan.max_batch >= 1)


def test_every_preset_names_its_source() -> None:
    assert all(load_model(name).source for name in model_names())
    assert all(load_machine(name).source for name in machine_names()[:-2])


def test_unknown_names_list_the_known_ones(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CostError, match="llama-3-8b"):
        load_model("gpt-5")
    with pytest.raises(CostError, match="h100"):
        load_machine("tpu")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CostError, match="object"):
        load_model(str(tmp_path))


def test_a_checkpoint_folder_brings_tower_and_tiling() -> None:
    model = load_model("default")
    assert model.tower is not None and model.tiling is not None
    assert model.tower.geometry.tokens_per_tile == 16
    assert model.tiling.to_json()["rule"] == "idefics3"
