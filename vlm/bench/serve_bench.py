"""`vlm bench serve`: the service over HTTP, by the field's conventions.

TTFT runs from the request sent to its first content token, decoding and queueing included. Goodput counts the
requests that meet both objectives. The mix of requests is that of `vlm.bench.serving.mix`.

Parts: load (all of that, the default), sweep (the same mix at rising rates, and the knee), soak (a mixed
load for minutes: the memory of the processes).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm.bench.harness.load_client import LoadClient, Sample, closed_loop, open_loop
from vlm.bench.harness.results import report, result, say
from vlm.bench.harness.server_process import Served, served
from vlm.bench.serving.chart import plot_sweep
from vlm.bench.serving.mix import REUSE, SLO_TPOT_MS, SLO_TTFT_MS, is_good, percentile, poisson, workload
from vlm.bench.serving.soak import soak
from vlm.bench.serving.sweep import Sweep, knee, sweep
from vlm.config import EngineOptions
from vlm.spec import ModelSpec

CLIENTS = 64
LOAD = 0.6  # of a closed loop's rate over the same mix, as Poisson arrivals
SOAK_S = 300.0


@dataclass(frozen=True)
class LoadReport:
    closed_loop_rps: float
    completed_rps: float
    refused: int
    undue: int  # answers that are neither complete nor a deliberate 429 or 503
    different_texts: int
    excused_texts: int  # of these: at a top-two gap below 1e-3
    memory_growth: float  # of a second identical load
    live_p99_ms: float


async def live_latencies(server: Served, stop: asyncio.Event) -> list[float]:
    """Milliseconds of /health/live while something else goes on."""
    times: list[float] = []
    reader, writer = await asyncio.open_connection(*server.address)
    while not stop.is_set():
        started = time.perf_counter()
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: bench\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        times.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(0.02)
    writer.close()
    return times


async def _alone(server: Served, body: bytes) -> Sample:
    client = LoadClient(*server.address)
    try:
        return await client.ask(body)
    finally:
        await client.close()


async def _gap_at_difference(server: Served, body: bytes, text: str) -> float:
    """Log-probability between the two likeliest tokens where `text` leaves the one-at-a-time answer."""
    client = LoadClient(*server.address)
    request = json.loads(body) | {"logprobs": True, "top_logprobs": 2, "stream": False}
    del request["stream_options"]
    data = await client.plain(json.dumps(request).encode())
    await client.close()
    so_far = ""
    for entry in data["choices"][0]["logprobs"]["content"]:
        so_far += entry["token"]
        if not text.startswith(so_far):
            top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
            return top[0] - top[1]
    return float("inf")


async def concurrent_load(server: Served, seconds: float, num_images: int = 16) -> LoadReport:
    """64 clients beside the closed-loop rate of 16, texts against one-at-a-time texts."""
    bodies = workload(num_images, 5000)
    texts = {key: (await _alone(server, body)).text for key, body in enumerate(bodies)}
    draw = random.Random(0)
    pick = lambda: draw.randrange(len(bodies))  # noqa: E731
    few = await closed_loop(server.address, bodies, pick, 16, seconds / 2)
    stop = asyncio.Event()
    probe = asyncio.create_task(live_latencies(server, stop))
    many = await closed_loop(server.address, bodies, pick, CLIENTS, seconds)
    stop.set()
    before = server.memory_bytes()
    again = await closed_loop(server.address, bodies, pick, CLIENTS, seconds)
    growth = server.memory_bytes() / before - 1
    done = [sample for sample in many if sample.completed]
    wrong = [s for s in (*many, *again) if s.completed and s.text != texts[s.key]]
    gaps = [await _gap_at_difference(server, bodies[s.key], s.text) for s in wrong]
    return LoadReport(
        closed_loop_rps=_rate(few),
        completed_rps=_rate(many),
        refused=sum(sample.status in (429, 503) for sample in many),
        undue=len(many) - len(done) - sum(sample.status in (429, 503) for sample in many),
        different_texts=len(wrong),
        excused_texts=sum(gap < 1e-3 for gap in gaps),
        memory_growth=growth,
        live_p99_ms=percentile(await probe, 0.99),
    )


def _rate(samples: Sequence[Sample]) -> float:
    done = [sample for sample in samples if sample.completed]
    if not done:
        return 0.0
    return len(done) / (max(s.ended for s in done) - min(s.sent for s in samples))


def run(
    quick: bool = False,
    parts: Sequence[str] = ("load",),
    seconds: float | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """`seconds`: how long a soak lasts; `plot`: where the sweep's chart goes."""
    spec = ModelSpec.load("default")
    options = EngineOptions()
    about = {
        "model": spec.name,
        "dtype": options.dtype,
        "threads": options.threads,
        "batch": f"<= {options.max_running}",
        "context": f"<= {spec.context_length}",
    }
    results: dict[str, Any] = {}
    if "load" in parts:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
            results |= asyncio.run(_measure(server, about, quick))
    if "sweep" in parts:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
            found, points = asyncio.run(sweep(server, about, quick))
        results |= found
        if plot:
            plot_sweep(plot, f"vlm bench serve: {spec.name}", points, knee(points))
    if "soak" in parts:
        results |= soak(seconds or (30.0 if quick else SOAK_S), about)
    return report("serve", results)


async def _measure(server: Served, about: dict[str, Any], quick: bool) -> dict[str, dict[str, Any]]:
    seconds = 5.0 if quick else 30.0
    say(f"serve: {CLIENTS} clients that ask as fast as they are answered, {seconds:.0f} s each way")
    load = await concurrent_load(server, seconds)
    count = 50 if quick else 500
    bodies = workload(count // REUSE, 9000)
    rate = LOAD * await Sweep(server, seconds / 2).capacity()
    say(f"serve: {count} requests at {rate:.1f} a second, about {count / rate:.0f} s")
    before, cpu = server.metrics(), server.cpu_seconds()
    started = time.perf_counter()
    samples = await open_loop(server.address, bodies, poisson(count, rate, count // REUSE))
    elapsed = time.perf_counter() - started
    cpu, after = server.cpu_seconds() - cpu, server.metrics()
    return {
        **_latencies(samples, {**about, "arrivals": f"Poisson, {rate:.1f}/s", "requests": count}),
        **_goodput(samples, elapsed, cpu, about),
        **_hits(before, after, about),
        **_load_results(load, {**about, "clients": CLIENTS, "seconds": seconds}),
    }


def _latencies(samples: Sequence[Sample], about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    done = [sample for sample in samples if sample.completed and sample.token_times]
    groups = {
        "ttft_cold": [s.ttft_ms for s in done if not s.warm],
        "ttft_warm": [s.ttft_ms for s in done if s.warm],
        "itl": [gap for s in done for gap in s.gaps_ms],
    }
    return {
        f"{name}_p{q}_ms": result(percentile(values, q / 100), "ms", n=len(values), **about)
        for name, values in groups.items()
        for q in (50, 90, 95, 99)
    }


def _goodput(
    samples: Sequence[Sample], elapsed: float, cpu_s: float, about: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    done = [s for s in samples if s.completed and s.token_times]
    good = [s for s in done if is_good(s)]
    tokens = sum(s.usage["completion_tokens"] for s in done)
    slo = f"TTFT <= {SLO_TTFT_MS:.0f} ms and TPOT <= {SLO_TPOT_MS:.0f} ms"
    return {
        "goodput_rps": result(len(good) / elapsed, "requests/s", slo=slo, **about),
        "completed_fraction": result(len(done) / len(samples), "fraction", **about),
        "tokens_per_s": result(
            tokens / elapsed,
            "tokens/s",
            per_user=statistics.median([1e3 / s.tpot_ms for s in done if s.tpot_ms] or [0.0]),
            server_cpu_s=cpu_s,
            **about,
        ),
    }


def _hits(
    before: dict[str, float], after: dict[str, float], about: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    found = {}
    for name, metric in (("visual_cache", "vlm_visual_cache"), ("prefix", "vlm_prefix_cache")):
        hits, queries = (
            after[f"{metric}_{kind}_total"] - before[f"{metric}_{kind}_total"] for kind in ("hits", "queries")
        )
        found[f"{name}_hit_fraction"] = result(hits / queries if queries else 0.0, "fraction", **about)
    return found


def _load_results(load: LoadReport, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "load_over_closed_loop": result(load.completed_rps / load.closed_loop_rps, "ratio", **about),
        "closed_loop_rps": result(load.closed_loop_rps, "requests/s", **{**about, "clients": 16}),
        "load_undue_answers": result(load.undue, "requests", refused=load.refused, **about),
        "load_different_texts": result(load.different_texts, "texts", excused=load.excused_texts, **about),
        "load_memory_growth": result(load.memory_growth, "fraction", **about),
        "live_p99_ms": result(load.live_p99_ms, "ms", **about),
    }
