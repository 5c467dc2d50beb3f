"""The soak: a mixed load on a service with small caches, and what its processes hold meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from vlm.bench.harness.results import result, say
from vlm.bench.harness.server_process import Served, served
from vlm.bench.serving.soak_load import SoakLoad

CLIENTS = 12
CACHES = {"kv_cache_mb": 32, "visual_cache_mb": 4}  # full within the first minute
EVERY_S = 1.0
WINDOW = 0.1  # of the run: what is compared are medians over this much after its middle and before its end

Readings = dict[str, list[tuple[float, int]]]  # by process: (seconds since the start, resident bytes)


def soak(seconds: float, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Growth of each process's memory over the second half of `seconds` of mixed load."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), engine=dict(CACHES)) as server:
        return asyncio.run(
            _soak(server, seconds, {**about, **CACHES, "clients": CLIENTS, "seconds": seconds})
        )


async def _soak(server: Served, seconds: float, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False, limits=limits) as http:
        load = SoakLoad(http)
        readings = await _watch(server, load, asyncio.create_task(load.run(CLIENTS, seconds)))
    answers = dict(load.done)
    figures = {
        "soak_answers": result(sum(answers.values()), "answers", kinds=answers, **about),
        "soak_undue_answers": result(
            sum(load.refused.values()), "answers", statuses=dict(load.refused), **about
        ),
    }
    for name, told in readings.items():
        half, end = ends(told)
        mib = {"mib_at_half": round(half / 2**20, 1), "mib_at_end": round(end / 2**20, 1)}
        growth = "soak_memory_growth" if name == "engine" else f"soak_{name}_memory_growth"
        figures[growth] = result(end / half - 1, "fraction", **mib, **about)
    return figures


async def _watch(server: Served, load: SoakLoad, running: asyncio.Task[None]) -> Readings:
    readings: Readings = {}
    started = said = time.monotonic()
    while not running.done():
        now = time.monotonic()
        for name, num_bytes in resident(server).items():
            readings.setdefault(name, []).append((now - started, num_bytes))
        if now - said >= 30:
            said = now
            mib = ", ".join(f"{name} {told[-1][1] / 2**20:.0f}" for name, told in readings.items())
            say(f"soak: {now - started:.0f} s, {sum(load.done.values())} answers; MiB: {mib}")
        await asyncio.wait([running], timeout=EVERY_S)
    await running
    return readings


def resident(server: Served) -> dict[str, int]:
    """Bytes by the role of a process."""
    processes = {
        "engine": server.children("vlm.engine_main"),
        "server": [psutil.Process(server.process.pid)],
        "decoders": server.children("workers.local.decode_process"),
        "grammar_process": server.children("workers.children.grammar_process"),
    }
    found: dict[str, int] = {}
    for name, members in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if members:
                found[name] = sum(member.memory_info().rss for member in members)
    return found


def ends(readings: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Median bytes after the middle of the run, and before its end."""
    last = readings[-1][0]
    half = [count for at, count in readings if 0.5 <= at / last <= 0.5 + WINDOW]
    end = [count for at, count in readings if at / last >= 1 - WINDOW]
    return statistics.median(half or end), statistics.median(end)
