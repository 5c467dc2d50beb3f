"""Queues and fleets: known formulas, monotony, and the price of scattering."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.cost import CostError, decode_time
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.simulation.fleet import FleetPlan, decode_batch_within, plan_fleet, render_fleet
from vlm.plan.simulation.prefix_routing import FleetLoad, scattered_hits
from vlm.plan.simulation.queueing import erlang_c, mean_wait_s, size_stage

MODEL, L40S = load_model("smolvlm-2.2b"), load_machine("l40s")
DECODER = MODEL.decoder.lumped()
quick = settings(deadline=None, max_examples=40)


def fleet(load: FleetLoad) -> FleetPlan:
    assert MODEL.tower is not None
    return plan_fleet(DECODER, MODEL.tower, L40S, load)


@pytest.mark.parametrize("utilisation", [0.1, 0.5, 0.9])
def test_one_server_waits_with_the_probability_that_it_is_busy(utilisation: float) -> None:
    assert erlang_c(1, utilisation) == pytest.approx(utilisation)
    assert mean_wait_s(1, utilisation, 1.0) == pytest.approx(utilisation / (1 - utilisation))


def test_erlang_c_of_two_servers() -> None:
    """a^2 / (2 - a) * 1 / (1 + a + a^2 / (2 - a)) in closed form."""
    a = 1.2
    tail = a * a / (2 - a)
    assert erlang_c(2, a) == pytest.approx(tail / (1 + a + tail))


def test_constant_service_waits_half_as_long() -> None:
    assert mean_wait_s(3, 2.0, 1.0, spread=0.0) == pytest.approx(mean_wait_s(3, 2.0, 1.0) / 2)
    assert mean_wait_s(2, 2.0, 1.0) == math.inf and mean_wait_s(2, 0.0, 1.0) == 0.0


@quick
@given(st.floats(0.1, 500), st.floats(0.001, 2), st.floats(0.01, 1), st.floats(0.3, 0.95))
def test_a_stage_is_the_smallest_that_keeps_its_limits(
    rate: float, service: float, wait: float, utilisation: float
) -> None:
    stage = size_stage(rate, service, wait, utilisation)
    assert stage.utilisation <= utilisation and stage.wait_s <= wait
    if stage.servers > 1:
        fewer = stage.servers - 1
        assert rate * service / fewer > utilisation or mean_wait_s(fewer, rate, service) > wait


def test_scattered_hits_are_what_random_routing_gives() -> None:
    draw, replicas, questions, trials = random.Random(0), 7, 5, 20_000
    hits = 0
    for _ in range(trials):
        seen: set[int] = set()
        for _ in range(questions):
            where = draw.randrange(replicas)
            hits += where in seen
            seen.add(where)
    assert scattered_hits(questions, replicas) == pytest.approx(hits / (trials * questions), abs=0.01)
    assert scattered_hits(4, 1) == pytest.approx(0.75)


@pytest.mark.parametrize("limit", [0.01, 0.03, 0.2])
def test_the_batch_within_a_tpot_limit_is_the_largest(limit: float) -> None:
    from llm.cost import Precision

    most = decode_batch_within(DECODER, L40S, 2000, limit, Precision())
    assert decode_time(DECODER, L40S, most, 2000).seconds <= limit
    larger = decode_time(DECODER, L40S, most + 1, 2000).seconds > limit
    assert larger or decode_batch_within(DECODER, L40S, 2000, 10.0, Precision()) == most


def test_a_fleet_grows_with_its_load_and_meets_its_limits() -> None:
    plans = [fleet(FleetLoad(requests_per_s=rate)) for rate in (1, 10, 100, 1000)]
    for stage in ("preprocess", "encode"):
        servers = [getattr(plan, stage).servers for plan in plans]
        assert servers == sorted(servers)
    replicas = [plan.affinity.replica.servers for plan in plans]
    assert replicas == sorted(replicas)
    for plan in plans:
        for routing in (plan.affinity, plan.scattered):
            assert routing.ttft_mean_s <= 1.0 and routing.replica.utilisation <= 0.8
            assert routing.ttft_hit_s < routing.ttft_miss_s


def test_losing_affinity_costs_replicas() -> None:
    plan = fleet(FleetLoad(requests_per_s=2000, questions_per_image=8, think_s=3))
    assert plan.affinity.hit_fraction > 0.8 and plan.scattered.hit_fraction < 0.1
    assert plan.replicas_lost == plan.scattered.replica.servers - plan.affinity.replica.servers > 0
    assert plan.scattered.ttft_mean_s > 0


def test_one_question_an_image_has_no_affinity_to_lose() -> None:
    plan = fleet(FleetLoad(requests_per_s=200, questions_per_image=1))
    assert plan.affinity.hit_fraction == plan.scattered.hit_fraction == 0
    assert plan.replicas_lost == 0


def test_prefixes_that_do_not_fit_are_not_hits() -> None:
    short, long = (fleet(FleetLoad(requests_per_s=500, think_s=think)) for think in (1, 600))
    assert short.affinity.prefix_kept == 1.0 and short.affinity.hit_fraction == pytest.approx(0.75)
    assert long.affinity.prefix_kept < 0.2 and long.binds == "capacity"
    assert long.affinity.replica.servers > short.affinity.replica.servers


def test_internet_scale_is_planned_in_proportion() -> None:
    thousand, million = (fleet(FleetLoad(requests_per_s=rate)) for rate in (1e3, 1e6))
    assert million.affinity.replica.servers == pytest.approx(
        1000 * thousand.affinity.replica.servers, rel=0.05
    )
    assert million.upload_bytes_per_s == pytest.approx(1000 * thousand.upload_bytes_per_s)
    assert "questions/s" in render_fleet(million, FleetLoad(requests_per_s=1e6), "")


def test_limits_that_no_fleet_meets_are_refused() -> None:
    with pytest.raises(CostError, match="TTFT"):
        fleet(FleetLoad(slo_ttft_s=1e-3))
    with pytest.raises(CostError, match="TPOT"):
        fleet(FleetLoad(slo_tpot_s=1e-5))
    for bad in (
        {"requests_per_s": 0},
        {"questions_per_image": 0.5},
        {"max_utilisation": 1.0},
        {"text_tokens": 0},
    ):
        with pytest.raises(CostError):
            replace(FleetLoad(), **bad)  # type: ignore[arg-type]
