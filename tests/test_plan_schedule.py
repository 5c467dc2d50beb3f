"""The scheduler's simulation: what has to hold for every policy and every list of requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from figures import shows
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.cost import CostError, DecoderShape, Machine, kv_bytes
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.labs import roofline
from vlm.plan.simulation.clock import POLICIES, Policy, Rules, Simulation
from vlm.plan.simulation.outcome import gaps, meets, render_reports, report
from vlm.plan.simulation.schedule import simulate
from vlm.plan.simulation.workload import ARTICLE_REQUESTS, Arrival, Lengths, poisson_arrivals, read_arrivals

SHAPE = DecoderShape(
    num_layers=4, d_model=256, num_heads=8, num_kv_heads=2, head_dim=32, num_params=3_000_000, vocab_size=1000
)
MACHINE = Machine("m", 1e11, 1e10, 1_000_000_000, link_bandwidth=1e9, workspace_bytes=0)
quick = settings(deadline=None, max_examples=30)

arrivals = st.lists(
    st.builds(Arrival, st.floats(0, 2), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=14
)
policies = st.sampled_from(POLICIES)


def held_at_once(sim: Simulation) -> int:
    """The most slots with a span at the same time, decode device only."""
    edges = [(s.start_s, 1) for s in sim.spans if s.slot < sim.rules.slots]
    edges += [(s.end_s, -1) for s in sim.spans if s.slot < sim.rules.slots]
    level = most = 0
    for _, change in sorted(edges):
        level += change
        most = max(most, level)
    return most


@quick
@given(arrivals, policies, st.integers(1, 6))
def test_every_request_gets_all_its_tokens_in_order(
    requests: list[Arrival], policy: Policy, slots: int
) -> None:
    sim = simulate(SHAPE, MACHINE, requests, Rules(policy, slots=slots, token_budget=64))
    for track in sim.tracks:
        assert len(track.token_s) == track.request.output_tokens
        assert track.prefilled == track.request.prompt_tokens
        assert track.start_s >= track.request.arrival_s
        assert track.token_s == sorted(track.token_s) and track.token_s[0] > track.start_s
    assert held_at_once(sim) <= slots
    # a prefill device gives first tokens: where it is apart, answers of one token use no slot
    uses_slots = policy != "disaggregated" or any(request.output_tokens > 1 for request in requests)
    assert (sim.slot_use > 0) == uses_slots and sim.slot_use <= 1


@quick
@given(arrivals, policies)
def test_the_same_requests_give_the_same_simulation(requests: list[Arrival], policy: Policy) -> None:
    rules = Rules(policy, slots=4, token_budget=64)
    first, second = (simulate(SHAPE, MACHINE, requests, rules) for _ in range(2))
    assert report(first) == report(second) and first.spans == second.spans


@quick
@given(arrivals, policies)
def test_memory_is_never_over_committed(requests: list[Arrival], policy: Policy) -> None:
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    room = 2 * kv_bytes(SHAPE, longest)
    tight = replace(MACHINE, memory_bytes=2 * SHAPE.num_params + room)
    sim = simulate(SHAPE, tight, requests, Rules(policy, slots=8, token_budget=64))
    times = sorted({t.start_s for t in sim.tracks})
    if policy == "disaggregated":
        return  # caches of waiting requests lie on the prefill devices
    for now in times:
        live = [t for t in sim.tracks if t.start_s <= now < t.token_s[-1]]
        assert sum(kv_bytes(SHAPE, t.request.prompt_tokens + len(t.token_s)) for t in live) <= room


def test_a_request_that_can_never_fit_is_refused() -> None:
    tiny = replace(MACHINE, memory_bytes=2 * SHAPE.num_params + 1000)
    with pytest.raises(CostError, match="larger"):
        simulate(SHAPE, tiny, [Arrival(0, 100, 1)], Rules("chunked"))
    with pytest.raises(CostError, match="at least one"):
        simulate(SHAPE, MACHINE, [], Rules("chunked"))


def test_static_batching_of_the_articles_requests_uses_29_5_percent() -> None:
    llama, h100 = load_model("llama-3-8b").decoder.lumped(), load_machine("h100")
    sim = simulate(llama, h100, ARTICLE_REQUESTS, Rules("static", slots=8))
    assert shows(sim.slot_use * 100, "29.5")
    assert sim.slot_use == roofline.slot_use([r.output_tokens for r in ARTICLE_REQUESTS])
    assert sim.num_steps == 500


def test_continuous_batching_keeps_slots_busy_and_ends_sooner() -> None:
    requests = ARTICLE_REQUESTS * 6
    static, continuous = (
        report(simulate(SHAPE, MACHINE, requests, Rules(p, slots=8))) for p in POLICIES[0:3:2]
    )
    assert static.slot_use < 0.35 < 0.75 < continuous.slot_use
    assert continuous.makespan_s < static.makespan_s


def test_chunked_prefill_bounds_the_gap_that_a_whole_prompt_opens() -> None:
    streams = [Arrival(0, 50, 400)] * 6
    late = Arrival(0.01, 4000, 5)
    whole, chunked = (
        simulate(SHAPE, MACHINE, [*streams, late], Rules(policy, slots=8, token_budget=64))
        for policy in ("continuous", "chunked")
    )
    assert report(whole).itl_max_over_p50 > 50
    assert report(chunked).itl_s.max < report(whole).itl_s.max / 20
    assert report(chunked).itl_s.p50 == pytest.approx(report(whole).itl_s.p50, rel=0.5)


def test_a_budget_is_kept() -> None:
    requests = [Arrival(0, 300, 30)] * 5
    sim = simulate(SHAPE, MACHINE, requests, Rules("chunked", slots=5, token_budget=20))
    assert sim.num_steps >= (5 * 300 + 5 * 29) / 20


def test_disaggregation_leaves_decode_steps_alone() -> None:
    requests = [Arrival(i * 0.02, 800, 40) for i in range(12)]
    mixed = report(simulate(SHAPE, MACHINE, requests, Rules("continuous", slots=12)))
    apart = report(simulate(SHAPE, MACHINE, requests, Rules("disaggregated", slots=12, prefill_devices=2)))
    assert apart.itl_s.p95 < mixed.itl_s.p95
    with pytest.raises(CostError, match="link"):
        simulate(SHAPE, replace(MACHINE, link_bandwidth=0), requests, Rules("disaggregated"))


def test_dynamic_batching_waits_for_its_window_only() -> None:
    requests = [Arrival(0, 10, 5), Arrival(0.04, 10, 5), Arrival(3, 10, 5)]
    sim = simulate(SHAPE, MACHINE, requests, Rules("dynamic", slots=8, window_s=0.05))
    starts = [track.start_s for track in sim.tracks]
    assert starts == pytest.approx([0.05, 0.05, 3.05])
    full = simulate(SHAPE, MACHINE, requests, Rules("dynamic", slots=2, window_s=5))
    assert full.tracks[0].start_s == pytest.approx(0.04)


def test_percentiles_goodput_and_throughput_come_from_the_tokens() -> None:
    requests = [Arrival(i * 0.01, 100, 20) for i in range(10)]
    sim = simulate(SHAPE, MACHINE, requests, Rules("chunked", slots=4, token_budget=64))
    ttft = sorted(t.token_s[0] - t.request.arrival_s for t in sim.tracks)
    limit = (ttft[4] + ttft[5]) / 2
    plain, limited = report(sim), report(sim, slo_ttft_s=limit)
    assert plain.ttft_s.p50 == pytest.approx(float(np.percentile(ttft, 50)))
    assert plain.itl_s.max == max(gap for t in sim.tracks for gap in gaps(t))
    assert plain.goodput_rps == pytest.approx(plain.requests_per_s)
    assert limited.goodput_rps == pytest.approx(plain.requests_per_s / 2)
    assert plain.output_tokens_per_s * plain.makespan_s == pytest.approx(200)
    assert sum(meets(t, limit, 0) for t in sim.tracks) == 5
    assert "chunked" in render_reports([plain], "")


def test_an_overload_is_bound_by_its_queue_or_by_memory() -> None:
    crowd = [Arrival(0, 100, 30)] * 40
    assert (
        report(simulate(SHAPE, MACHINE, crowd, Rules("chunked", slots=2, token_budget=64))).binds == "queue"
    )
    tight = replace(MACHINE, memory_bytes=2 * SHAPE.num_params + 3 * kv_bytes(SHAPE, 130))
    assert (
        report(simulate(SHAPE, tight, crowd, Rules("chunked", slots=32, token_budget=64))).binds == "capacity"
    )
    assert report(simulate(SHAPE, MACHINE, crowd[:1], Rules("chunked", token_budget=64))).binds == "bandwidth"


def test_poisson_arrivals_have_their_rate_and_lengths() -> None:
    made = poisson_arrivals(20, 4000, Lengths.parse("uniform:10:20"), Lengths.parse("lognormal:100:0.5"), 3)
    times = np.array([a.arrival_s for a in made])
    between = np.diff(times)
    assert times[-1] / 4000 == pytest.approx(1 / 20, rel=0.06)
    assert between.std() / between.mean() == pytest.approx(1, rel=0.1)
    assert {a.prompt_tokens for a in made} == set(range(10, 21))
    assert np.median([a.output_tokens for a in made]) == pytest.approx(100, rel=0.05)
    assert made == poisson_arrivals(
        20, 4000, Lengths.parse("uniform:10:20"), Lengths.parse("lognormal:100:0.5"), 3
    )


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:0", "fixed:a", "uniform:5", "uniform:9:3", "lognormal:5", "zipf:1:2", "fixed:1:2"],
)
def test_other_length_forms_are_refused(text: str) -> None:
    with pytest.raises(CostError):
        Lengths.parse(text)


def test_requests_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    rows = [
        {"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 6},
        {"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 4},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_arrivals(file) == (Arrival(1, 3, 4), Arrival(2, 5, 6))
    for text, words in (
        ("{}", "line 1"),
        ("", "no requests"),
        ('{"arrival_s":-1,"prompt_tokens":1,"output_tokens":1}', "line 1: a request"),
    ):
        file.write_text(text)
        with pytest.raises(CostError, match=words):
            read_arrivals(file)
    with pytest.raises(CostError, match="read"):
        read_arrivals(tmp_path / "absent")


@pytest.mark.parametrize(
    "rules", [{"policy": "magic"}, {"slots": 0}, {"token_budget": 4, "slots": 8}, {"window_s": -1.0}]
)
def test_impossible_rules_are_refused(rules: dict[str, object]) -> None:
    with pytest.raises(CostError):
        Rules(**rules)  # type: ignore[arg-type]
