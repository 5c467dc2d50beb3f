"""64 clients with images of mixed sizes: what issue 8 asks of a service under load. Figures are printed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from vlm.bench.harness.server_process import served
from vlm.bench.serve_bench import concurrent_load
from vlm.bench.serving.mix import percentile, poisson

SECONDS = float(os.environ.get("VLM_LOAD_SECONDS", "60"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_64_clients_get_right_answers_at_the_closed_loop_rate(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        load = asyncio.run(concurrent_load(server, SECONDS))
    print(load)
    assert load.completed_rps >= 0.8 * load.closed_loop_rps
    assert load.undue == 0
    assert load.different_texts == load.excused_texts
    assert load.memory_growth <= 0.02


def test_arrivals_reuse_their_pool_as_said() -> None:
    arrivals = poisson(500, 10.0, 100)
    images = [key // 3 for _, key in arrivals]
    assert {images.count(image) for image in set(images)} == {5} and len(set(images)) == 100
    times = [at for at, _ in arrivals]
    assert times == sorted(times) and times[-1] == pytest.approx(50, rel=0.2)


def test_percentiles_are_of_the_sample() -> None:
    values = [float(i) for i in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (50.0, 99.0, 3.0)
