"""The chart of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlm.bench.serving.sweep import RatePoint
from vlm.plan.plots import figure


def plot_sweep(path: Path, title: str, points: Sequence[RatePoint], knee_rps: float) -> None:
    """Goodput, and times to first tokens, against the offered rate. Raises as `figure` does."""
    ordered = sorted(points, key=lambda point: point.offered_rps)
    rates = [point.offered_rps for point in ordered]
    with figure(path, title, panels=2) as (goodput, latency):
        goodput.plot(rates, [point.goodput_rps for point in ordered], marker="o", label="within objectives")
        goodput.plot(rates, rates, linestyle=":", color="grey", label="offered")
        goodput.set(xlabel="offered, requests/s", ylabel="requests/s", ylim=(0, None))
        latency.plot(rates, [point.ttft_warm_p95 for point in ordered], marker="o", label="known image")
        latency.plot(rates, [point.ttft_cold_p95 for point in ordered], marker="o", label="new image")
        latency.set(xlabel="offered, requests/s", ylabel="time to first token, p95, ms", yscale="log")
        for axis in (goodput, latency):
            axis.axvline(knee_rps, linestyle="--", color="grey", label="knee")
            axis.legend()
