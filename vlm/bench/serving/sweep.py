"""One mix of requests at rising rates: latencies and goodput at each, and the knee."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlm.bench.harness.load_client import LoadClient, Sample, closed_loop, open_loop
from vlm.bench.harness.results import result, say
from vlm.bench.harness.server_process import Served
from vlm.bench.serving.mix import (
    QUESTIONS,
    REUSE,
    SIZES,
    FreshMix,
    is_good,
    percentile,
    picture,
    poisson,
)

CLIENTS = 16  # of the closed loop that finds the mix's capacity
FRACTIONS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)  # of it
QUICK_FRACTIONS = (0.4, 0.8, 1.2)
KEPT = 0.9  # of the offered rate has to be goodput up to the knee
STRIDE = 1.25  # between rates beyond the last of these
MOST_BEYOND = 6
BELOW_KNEE = 0.7
UNLOADED = 60  # requests, one at a time
POOL = 50  # images that are asked about in turns
DRAWINGS = 8  # pictures, each of many images


@dataclass(frozen=True, slots=True)
class RatePoint:
    """What one offered rate gave. Times in milliseconds, nan where nothing was answered."""

    offered_rps: float
    goodput_rps: float
    ttft_warm_p50: float
    ttft_warm_p95: float
    ttft_cold_p50: float
    ttft_cold_p95: float
    itl_p95: float

    @property
    def is_kept(self) -> bool:
        return self.goodput_rps >= KEPT * self.offered_rps


def rate_point(samples: Sequence[Sample]) -> RatePoint:
    """Of an open loop's samples; the offered rate is that of their own arrivals."""
    sent = sorted(sample.sent for sample in samples)
    done = [sample for sample in samples if sample.completed and sample.token_times]
    elapsed = max(sample.ended for sample in samples) - sent[0]
    warm = [sample.ttft_ms for sample in done if sample.warm]
    cold = [sample.ttft_ms for sample in done if not sample.warm]
    return RatePoint(
        offered_rps=(len(sent) - 1) / (sent[-1] - sent[0]),
        goodput_rps=sum(map(is_good, samples)) / elapsed,
        ttft_warm_p50=percentile(warm, 0.5),
        ttft_warm_p95=percentile(warm, 0.95),
        ttft_cold_p50=percentile(cold, 0.5),
        ttft_cold_p95=percentile(cold, 0.95),
        itl_p95=percentile([gap for sample in done for gap in sample.gaps_ms], 0.95),
    )


def knee(points: Sequence[RatePoint]) -> float:
    """The highest offered rate up to which goodput keeps up; 0 where it never does."""
    ordered = sorted(points, key=lambda point: point.offered_rps)
    kept = list(itertools.takewhile(lambda point: point.is_kept, ordered))
    return kept[-1].offered_rps if kept else 0.0


async def rising(at: Callable[[float], Awaitable[RatePoint]], rates: Sequence[float]) -> list[RatePoint]:
    """Points at `rates`, ascending, and beyond the last while it is kept: a knee lies between two rates."""
    points: list[RatePoint] = []
    beyond = [rates[-1] * STRIDE**step for step in range(1, MOST_BEYOND + 1)]
    for number, rate in enumerate([*rates, *beyond]):
        if number >= len(rates) and not points[-1].is_kept:
            break
        say(f"serve: the mix at {rate:.0f} requests a second")
        points.append(await at(rate))
    return points


def endless_keys() -> Iterator[int]:
    """Keys of a mix without end; within every `POOL` images each is asked about `REUSE` times."""
    for pool in itertools.count():
        for _, key in poisson(POOL * REUSE, 1.0, POOL, seed=pool):
            yield pool * POOL * len(QUESTIONS) + key


class Sweep:
    """Runs against one server; every run asks about images that it has not seen."""

    def __init__(self, server: Served, seconds: float) -> None:
        self._server = server
        self._seconds = seconds  # of each rate
        self._pictures = [picture(9000 + i, *SIZES[i % len(SIZES)]) for i in range(DRAWINGS)]
        self._runs = itertools.count()

    def _mix(self) -> FreshMix:
        return FreshMix(self._pictures, f"{id(self)}:{next(self._runs)}")

    async def capacity(self) -> float:
        """Requests a second of a closed loop over the same mix."""
        keys = endless_keys()
        samples = await closed_loop(
            self._server.address, self._mix(), lambda: next(keys), CLIENTS, self._seconds
        )
        done = [sample for sample in samples if sample.completed]
        return len(done) / (max(s.ended for s in done) - min(s.sent for s in done))

    async def unloaded(self) -> RatePoint:
        """One request at a time, each image `REUSE` times in a row."""
        mix, draw = self._mix(), random.Random(1)
        client = LoadClient(*self._server.address)
        samples = []
        for number in range(UNLOADED):
            key = number // REUSE * len(QUESTIONS) + draw.randrange(len(QUESTIONS))
            samples.append(await client.ask(mix[key], key))
        await client.close()
        return rate_point(samples)

    async def at(self, rate: float) -> RatePoint:
        count = max(REUSE * 2, int(rate * self._seconds))
        arrivals = poisson(count, rate, count // REUSE, seed=next(self._runs))
        return rate_point(await open_loop(self._server.address, self._mix(), arrivals))


async def sweep(
    server: Served, about: dict[str, Any], quick: bool
) -> tuple[dict[str, dict[str, Any]], list[RatePoint]]:
    """Figures by name, and the points that they were taken from."""
    run = Sweep(server, 5.0 if quick else 15.0)
    await run.at(20.0)  # so that nothing below is the first of its kind
    unloaded, most = await run.unloaded(), await run.capacity()
    fractions = QUICK_FRACTIONS if quick else FRACTIONS
    points = await rising(run.at, [fraction * most for fraction in fractions])
    found = knee(points)
    about = {**about, "mix": f"{REUSE - 1} in {REUSE} warm"}
    results = {
        f"sweep_{int(point.offered_rps)}_rps": result(point.goodput_rps, "good requests/s", **_cells(point))
        for point in points
    } | {
        "mix_capacity_rps": result(most, "requests/s", **about, clients=CLIENTS),
        "knee_rps": result(found, "requests/s", **about, kept=KEPT),
        "unloaded_ttft_warm_p95_ms": result(unloaded.ttft_warm_p95, "ms", **about, requests=UNLOADED),
    }
    if found:
        say(f"serve: {BELOW_KNEE} of the knee, {BELOW_KNEE * found:.0f} requests a second")
        below = await run.at(BELOW_KNEE * found)
        about["offered_rps"] = round(below.offered_rps, 1)
        ratio = below.ttft_warm_p95 / unloaded.ttft_warm_p95
        results["warm_ttft_p95_over_unloaded_at_0_7"] = result(ratio, "times", **about)
        results["cold_ttft_p95_ms_at_0_7"] = result(below.ttft_cold_p95, "ms", **about)
    return results, points


def _cells(point: RatePoint) -> dict[str, float]:
    names = ("ttft_warm_p50", "ttft_warm_p95", "ttft_cold_p50", "ttft_cold_p95", "itl_p95")
    return {f"{name}_ms": round(getattr(point, name), 1) for name in names}
