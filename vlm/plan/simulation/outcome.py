"""What a simulation showed: latencies by percentile, slot use, goodput, and what bound it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm.cost import Bound
from vlm.plan.render import count, duration, grid, percent
from vlm.plan.simulation.schedule import Policy, Simulation, Track

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """All zero for no values: a request of one token has no gaps."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        at = [float(v) for v in np.percentile(values, PERCENTILES)]
        return cls(at[0], at[1], at[2], at[3], float(max(values)))


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    policy: Policy
    requests: int
    slots: int
    ttft_s: Percentiles
    itl_s: Percentiles  # gaps between tokens, over all requests
    tpot_s: Percentiles  # mean gap of each request
    e2e_s: Percentiles
    queue_s: Percentiles  # arrival to first scheduled
    itl_max_over_p50: float
    slot_use: float
    output_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float  # requests/s that met both limits
    makespan_s: float
    steps: int
    binds: Bound


def gaps(track: Track) -> list[float]:
    return [later - earlier for earlier, later in zip(track.token_s, track.token_s[1:], strict=False)]


def meets(track: Track, slo_ttft_s: float, slo_tpot_s: float) -> bool:
    """Whether a request kept its limits, 0 meaning none; its TPOT is its mean gap."""
    between = gaps(track)
    ttft = track.token_s[0] - track.request.arrival_s
    tpot = sum(between) / len(between) if between else 0.0
    return (not slo_ttft_s or ttft <= slo_ttft_s) and (not slo_tpot_s or tpot <= slo_tpot_s)


def report(sim: Simulation, slo_ttft_s: float = 0.0, slo_tpot_s: float = 0.0) -> ScheduleReport:
    tracks = sim.tracks
    all_gaps = [gap for track in tracks for gap in gaps(track)]
    itl = Percentiles.of(all_gaps)
    span = sim.end_s - min(track.request.arrival_s for track in tracks)
    queue = [track.start_s - track.request.arrival_s for track in tracks]
    ttft = [track.token_s[0] - track.request.arrival_s for track in tracks]
    good = sum(meets(track, slo_ttft_s, slo_tpot_s) for track in tracks)
    return ScheduleReport(
        policy=sim.rules.policy,
        requests=len(tracks),
        slots=sim.rules.slots,
        ttft_s=Percentiles.of(ttft),
        itl_s=itl,
        tpot_s=Percentiles.of([sum(g) / len(g) for g in map(gaps, tracks) if g]),
        e2e_s=Percentiles.of([track.token_s[-1] - track.request.arrival_s for track in tracks]),
        queue_s=Percentiles.of(queue),
        itl_max_over_p50=itl.max / itl.p50 if itl.p50 else 0.0,
        slot_use=sim.slot_use,
        output_tokens_per_s=sum(len(track.token_s) for track in tracks) / span,
        requests_per_s=len(tracks) / span,
        goodput_rps=good / span,
        makespan_s=span,
        steps=sim.num_steps,
        binds=_binds(sim, sum(queue), sum(ttft)),
    )


def _binds(sim: Simulation, queued_s: float, ttft_s: float) -> Bound:
    """Queue (capacity, where memory kept requests out) if half the time to the first token is waiting."""
    if queued_s > ttft_s / 2:
        return "capacity" if any(track.blocked_by_memory for track in sim.tracks) else "queue"
    return max(sim.bound_s, key=lambda bound: sim.bound_s[bound])


def render_reports(reports: Sequence[ScheduleReport], title: str) -> str:
    header = (
        "policy",
        "TTFT p50",
        "p95",
        "p99",
        "ITL p50",
        "p99",
        "max",
        "E2E p50",
        "slot use",
        "tok/s",
        "goodput",
        "binds",
    )
    rows = [
        (
            r.policy,
            duration(r.ttft_s.p50),
            duration(r.ttft_s.p95),
            duration(r.ttft_s.p99),
            duration(r.itl_s.p50),
            duration(r.itl_s.p99),
            duration(r.itl_s.max),
            duration(r.e2e_s.p50),
            percent(r.slot_use),
            count(r.output_tokens_per_s),
            f"{r.goodput_rps:.3g}/s",
            r.binds,
        )
        for r in reports
    ]
    return title + "\n" + grid(header, rows)
