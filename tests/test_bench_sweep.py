"""The sweep of rates: what it asks, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from vlm.bench.harness.load_client import Sample
from vlm.bench.serving.chart import plot_sweep
from vlm.bench.serving.mix import QUESTIONS, REUSE, SLO_TTFT_MS, FreshMix, picture, stamped
from vlm.bench.serving.sweep import POOL, RatePoint, endless_keys, knee, rate_point, rising


def answered(sent: float, ttft_s: float, encode_ms: float = 0.0) -> Sample:
    times = [sent + ttft_s, sent + ttft_s + 0.01]
    usage, timings = {"completion_tokens": 2}, {"encode_ms": encode_ms}
    return Sample(0, sent, 200, times[-1], times, "ab", usage, timings)


def point(offered: float, goodput: float) -> RatePoint:
    return RatePoint(offered, goodput, *[1.0] * 5)


def test_a_closed_loop_asks_the_mix_of_the_open_one() -> None:
    keys = list(itertools.islice(endless_keys(), 3 * POOL * REUSE))
    images = [key // len(QUESTIONS) for key in keys]
    assert set(Counter(images).values()) == {REUSE} and len(set(images)) == 3 * POOL
    assert set(images[: POOL * REUSE]) == set(range(POOL))


def test_every_image_of_a_fresh_mix_is_one_of_its_own_with_the_pixels_of_a_drawing() -> None:
    drawing = picture(1, 64, 48)
    one, other = stamped(drawing, "a:1"), stamped(drawing, "a:2")
    pixels = [Image.open(BytesIO(data)).tobytes() for data in (drawing, one, other)]
    assert len({drawing, one, other}) == 3 and pixels[0] == pixels[1] == pixels[2]
    mix, again = FreshMix([drawing], "a"), FreshMix([drawing], "b")
    bodies = {mix[0], mix[len(QUESTIONS)], again[0]}
    urls = {json.loads(body)["messages"][0]["content"][0]["image_url"]["url"] for body in bodies}
    assert len(urls) == 3 and mix[0] == FreshMix([drawing], "a")[0]


def test_goodput_counts_what_met_its_objectives_over_the_time_it_took() -> None:
    samples = [answered(float(i), 0.1, 5.0 if i % 5 == 0 else 0.0) for i in range(11)]
    found = rate_point(samples)
    assert found.offered_rps == pytest.approx(1.0)
    assert found.goodput_rps == pytest.approx(11 / 10.11)
    assert found.ttft_warm_p50 == pytest.approx(found.ttft_cold_p95) == pytest.approx(100)
    late = [*samples[:-1], answered(10.0, SLO_TTFT_MS / 1e3 + 1)]
    refused = [*samples[:-1], Sample(0, 10.0, 429, 10.1, error="queue_full")]
    assert rate_point(late).goodput_rps < 10 / 10.11 and rate_point(refused).goodput_rps < 1.0


def test_a_rate_without_answers_is_no_goodput() -> None:
    found = rate_point([Sample(0, float(i), 503, i + 0.1, error="overloaded") for i in range(3)])
    assert found.goodput_rps == 0 and math.isnan(found.ttft_warm_p95)


def test_the_knee_is_the_last_rate_before_the_first_that_is_not_kept() -> None:
    points = [point(10, 10), point(40, 20), point(20, 19), point(50, 49), point(30, 28)]
    assert knee(points) == 30
    assert knee([replace(points[0], goodput_rps=1)]) == 0


@pytest.mark.parametrize(("limit", "tried"), [(15, 2), (20, 3), (26, 4), (1e9, 8)])
def test_rates_rise_until_one_is_not_kept(limit: float, tried: int) -> None:
    async def at(rate: float) -> RatePoint:
        return point(rate, min(rate, limit * 0.9))

    points = asyncio.run(rising(at, [10, 20]))
    assert len(points) == tried and points[-1].is_kept == (limit > 1e6)


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_sweep(tmp_path / "sweep.png", "a sweep", [point(10, 10), point(20, 12)], 10)
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.format == "PNG"
