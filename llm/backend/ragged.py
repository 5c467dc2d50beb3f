"""A step plan flattened to arrays, and checked: what every backend computes from. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from llm.backend.base import StepItem, StepPlan


class PlanError(ValueError):
    """A plan that would read or write outside the model's or the pool's bounds: a fault of the caller."""


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    num_blocks: int
    vocab_size: int
    max_positions: int
    row_width: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """The chunks of a plan one after the other: T tokens of n items.

    Item i owns rows [offsets[i], offsets[i + 1]), attends to positions [0, lengths[i]), and keeps them in
    blocks[block_start[i] : block_start[i + 1]].
    """

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    slots: np.ndarray  # int64 [T]: block * block_size + position inside the block
    offsets: np.ndarray  # int32 [n + 1]
    lengths: np.ndarray  # int32 [n]: start + chunk
    blocks: np.ndarray  # int32: as many of each item as its length needs
    block_start: np.ndarray  # int64 [n + 1]
    num_logits: np.ndarray  # int32 [n]
    logit_rows: np.ndarray  # int32 [R]: rows whose logits are wanted, ascending
    visible: np.ndarray | None = None  # int32 [T]: keys that a row sees; None: causal in every row
    rope: np.ndarray | None = None  # int32 [3, T]: where rope turns a row on each axis; None: at `positions`


def flatten(plan: StepPlan, limits: Limits) -> Ragged:
    """Raises PlanError before anything is written."""
    items, size = plan.items, limits.block_size
    for pair in plan.copies:
        if not all(0 <= block < limits.num_blocks for block in pair):
            raise PlanError("a copied block is outside the pool")
    for item in items:
        _check_item(item, limits)
    counts = np.array([len(item.token_ids) for item in items], np.int32)
    starts = np.array([item.start for item in items], np.int32)
    num_logits = np.array([item.num_logits for item in items], np.int32)
    offsets, lengths = _starts(counts, np.int32), starts + counts
    widths = -(-lengths // size)
    block_start = _starts(widths, np.int64)
    tables = (item.block_table[:width] for item, width in zip(items, widths.tolist(), strict=True))
    blocks = np.fromiter(chain.from_iterable(tables), np.int32, int(block_start[-1]))
    token_ids = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int32, int(offsets[-1]))
    if blocks.size and (blocks.min() < 0 or blocks.max() >= limits.num_blocks):
        raise PlanError("a block table names a block outside the pool")
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= limits.vocab_size):
        raise PlanError("a token id is outside the vocabulary")
    rows = np.arange(token_ids.size, dtype=np.int32)
    positions = rows + np.repeat(starts - offsets[:-1], counts)
    first_block = np.repeat(block_start[:-1], counts)
    slots = blocks[first_block + positions // size].astype(np.int64) * size + positions % size
    # Row r of the batch is wanted when it is among its item's last num_logits.
    wanted = rows >= np.repeat(offsets[1:] - num_logits, counts)
    return Ragged(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        offsets=offsets,
        lengths=lengths,
        blocks=blocks,
        block_start=block_start,
        num_logits=num_logits,
        logit_rows=rows[wanted],
        visible=_visible(items, positions, offsets),
        rope=_rope(items, positions, offsets),
    )


def _rope(items: Sequence[StepItem], positions: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    if all(item.rope is None for item in items):
        return None
    rope = np.repeat(positions[None], 3, 0)
    for item, offset in zip(items, offsets.tolist(), strict=False):
        if item.rope is not None:
            rope[:, offset : offset + len(item.token_ids)] = item.rope
    return rope


def _visible(items: Sequence[StepItem], positions: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    if not any(item.whole for item in items):
        return None
    visible = positions + np.int32(1)
    for item, offset in zip(items, offsets.tolist(), strict=False):
        for start, end in item.whole:
            rows = slice(offset + max(start - item.start, 0), offset + end - item.start)
            visible[rows] = end
    return visible


def _starts(counts: np.ndarray, dtype: type[np.signedinteger]) -> np.ndarray:
    """[n + 1]: where each of `counts` items begins, and the end."""
    starts = np.zeros(counts.size + 1, dtype)
    counts.cumsum(out=starts[1:])
    return starts


def _check_item(item: StepItem, limits: Limits) -> None:
    count = len(item.token_ids)
    end = item.start + count
    if count == 0 or item.start < 0 or not 0 <= item.num_logits <= count:
        raise PlanError("a chunk is empty, starts before 0 or wants more logits than it has tokens")
    if end > limits.max_positions:
        raise PlanError("a chunk ends beyond the model's positions")
    if len(item.block_table) * limits.block_size < end:
        raise PlanError("a block table does not cover its chunk")
    for first, last in item.whole:
        if not (0 <= first < last and item.start < last <= end):
            raise PlanError("an interval seen as a whole ends outside its chunk")
    if item.rope is not None:
        if item.rope.shape != (3, count):
            raise PlanError("rope positions are not three for each token of their chunk")
        if item.rope.min() < 0 or item.rope.max() >= end:
            raise PlanError("a rope position lies outside the sequence")
    for visual in item.visuals:
        if visual.start < 0 or visual.start + len(visual.rows) > count:
            raise PlanError("visual rows lie outside their chunk")
        if tuple(visual.rows.shape[1:]) != (limits.row_width,):
            raise PlanError("visual rows are not as wide as the model")
