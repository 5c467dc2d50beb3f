"""Where rope turns the tokens of a prompt whose images have rows and columns (M-RoPE). Torch-free.

Reference: `get_rope_index` of transformers' Qwen2-VL, for still images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm.request import ImageSpan

TIME, ROW, COLUMN = range(3)


def rope_positions(spans: Sequence[ImageSpan], start: int, end: int) -> np.ndarray | None:
    """Of tokens [start, end): int32 [3, end - start], a position on each axis. None where no span has a
    shape: all three are the token's own.

    Text goes on by one on every axis. An image at p stays at p in time and has p + row and p + column; what
    follows it goes on at p + its longer side. So no position is above its token's own.
    """
    if all(span.shape is None for span in spans):
        return None
    positions = np.repeat(np.arange(start, end, dtype=np.int32)[None], 3, 0)
    shift = 0
    for span in spans:
        if span.start >= end:
            break
        if span.shape is None:
            continue
        rows, cols = span.shape
        behind = span.start + span.length
        first, last = max(span.start, start), min(behind, end)
        if first < last:
            cell = np.arange(first - span.start, last - span.start, dtype=np.int32)
            inside = positions[:, first - start : last - start]
            inside[:] = span.start + shift
            inside[ROW] += cell // cols
            inside[COLUMN] += cell % cols
        moved = max(rows, cols) - span.length
        positions[:, max(behind - start, 0) :] += moved
        shift += moved
    return positions


def chunked_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """The axis of each frequency: so many of time, then of rows, then of columns, and over again."""
    return tuple(index % 3 for index, count in enumerate(sections) for _ in range(count))


def interleaved_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """The axis of each frequency: time, row, column in turns, as many of each as `sections` has for it; those
    left over are of time."""
    axes = [TIME] * sum(sections)
    for axis in (ROW, COLUMN):
        for frequency in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[frequency] = axis
    return tuple(axes)
