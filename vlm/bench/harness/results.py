"""The benchmarks' common form: named values with unit, model and circumstances; spread beside medians."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

LEAST_S = 1e-6  # a virtual machine's processor clock stands still while its host is busy


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
    }


def result(value: float, unit: str, **circumstances: Any) -> dict[str, Any]:
    """One figure: `circumstances` say model, dtype, threads, batch, context and what else it depends on."""
    return {"value": value, "unit": unit, **circumstances}


def say(text: str) -> None:
    """Progress, on stderr; figures go to stdout."""
    print(text, file=sys.stderr, flush=True)


def in_turn(bench: str, phases: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """The phases' figures together; says which one it is at."""
    figures: dict[str, Any] = {}
    started = time.perf_counter()
    for number, (name, phase) in enumerate(phases.items(), 1):
        say(f"{bench}: {name} ({number} of {len(phases)}, {time.perf_counter() - started:.0f} s so far)")
        figures |= phase()
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def report(bench: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"bench": bench, "machine": machine(), "results": results}


def tree_cpu_seconds() -> float:
    """CPU seconds of this process, its living children and those it has waited for."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:4])
    for child in own.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return float(total)


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """(value, wall seconds, CPU seconds of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function()
    return value, time.perf_counter() - wall, max(time.process_time() - cpu, LEAST_S)


def table(document: dict[str, Any]) -> str:
    lines = [f"{document['bench']}: {document['machine']['cpu']}, {document['machine']['cores']} cores"]
    for name, entry in document["results"].items():
        notes = ", ".join(f"{k} {v}" for k, v in entry.items() if k not in ("value", "unit", "spread"))
        lines.append(f"  {name:36} {entry['value']:>12.4g} {entry['unit']:14} {notes}")
    return "\n".join(lines)
