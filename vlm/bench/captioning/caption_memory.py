"""Peak memory of `vlm caption` over folders of two sizes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from vlm.bench.harness.bench_pages import make_folder
from vlm.bench.harness.results import result, say


def memory(root: Path, sizes: tuple[int, int]) -> dict[str, Any]:
    """Peak resident memory of the command's whole process tree, by the folder's size."""
    peaks = {}
    for num_pages in (10, *sizes):  # the first one compiles what is compiled once
        folder = root / f"pages{num_pages}"
        say(f"{num_pages} pages, watching memory")
        made = make_folder(folder, num_pages, pdfs=2 if num_pages in sizes else 0)
        out = root / f"pages{num_pages}.jsonl"
        command = [sys.executable, "-m", "vlm.cli.main", "caption", str(folder), "-o", str(out)]
        started = time.perf_counter()
        process = psutil.Popen(
            [*command, "--quiet", "--max-tokens", "24", "--dpi", "72"], stderr=subprocess.DEVNULL
        )
        peak = _peak_rss(process)
        if process.returncode != (3 if made.num_broken else 0):
            raise RuntimeError("the caption command failed")
        peaks[num_pages] = (peak / 2**20, time.perf_counter() - started)
    small, large = (peaks[size][0] for size in sizes)
    about = {
        "model": "vlm-default",
        "dtype": "float32",
        "threads": 1,
        "pages": list(sizes),
        "peak_mib": [round(peaks[size][0]) for size in sizes],
    }
    seconds = [round(peaks[size][1], 1) for size in sizes]
    return {"memory_many_over_few_pages": result(large / small, "times", **about, seconds=seconds)}


def _peak_rss(process: psutil.Popen) -> int:
    peak = 0
    while process.poll() is None:
        total = 0
        for member in (process, *process.children(recursive=True)):
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
        time.sleep(0.05)
    return peak
