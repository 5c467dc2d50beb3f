"""At which priority a decode process worked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm.request import Priority
from workers.background import BATCH_NICENESS


@contextmanager
def decoding_at_priority(pid: int, priority: Priority) -> Iterator[None]:
    """Asserts that nearly all processor time of the process within the block was spent at that priority."""
    before = ticks_by_niceness(pid)
    yield
    used = {nice: ticks - before.get(nice, 0) for nice, ticks in ticks_by_niceness(pid).items()}
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    low = min(19, usual + BATCH_NICENESS)
    assert low > usual, "the test itself runs at the lowest priority"
    more, less = (low, usual) if priority == "batch" else (usual, low)
    assert used[more] > 10 * used.get(less, 0)


def ticks_by_niceness(pid: int) -> dict[int, int]:
    """Processor time of a process's threads, in clock ticks."""
    ticks: dict[int, int] = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = stat.read_text().rsplit(")", 1)[1].split()
        nice = int(fields[16])
        ticks[nice] = ticks.get(nice, 0) + int(fields[11]) + int(fields[12])
    return ticks
