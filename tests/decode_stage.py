"""Images that decode processes get, and what these do with their time."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hostile_images import many_scan_jpeg
from PIL import Image

from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec
from preprocess.tiling import Idefics3Tiling
from workers.local.background import BATCH_NICENESS

SPEC = PreprocessSpec(Idefics3Tiling(tile_size=32, longest_edge=96))
LIMITS = ImageLimits()


def png(seed: int = 0, size: tuple[int, int] = (90, 60)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def slow_image() -> bytes:
    """About a second of decoding."""
    return many_scan_jpeg(4096, 500)


def endless_image() -> bytes:
    """Minutes of decoding."""
    return many_scan_jpeg(4096, 60_000)


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def decoding_at_lower_priority(pids: Sequence[int], lower: bool) -> Iterator[None]:
    """Asserts that nearly all processor time of the processes within the block was spent at lower priority,
    or nearly none."""
    before = ticks_by_niceness(pids)
    yield
    used = ticks_by_niceness(pids)
    used.subtract(before)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    low = min(19, usual + BATCH_NICENESS)
    assert low > usual, "the test itself runs at the lowest priority"
    more, less = (low, usual) if lower else (usual, low)
    assert used[more] > 10 * used[less]


def ticks_by_niceness(pids: Sequence[int]) -> Counter[int]:
    """Processor time of the processes' threads, in clock ticks."""
    ticks: Counter[int] = Counter()
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            ticks[int(fields[16])] += int(fields[11]) + int(fields[12])
    return ticks
