"""A step plan flattened to arrays, and checked: what every backend computes from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

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
    d_model: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """The chunks of a plan one after the other: T tokens of n items.

    Item i owns rows [offsets[i], offsets[i + 1]) and attends to positions [0, lengths[i]).
    """

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    slots: np.ndarray  # int64 [T]: block * block_size + position inside the block
    offsets: np.ndarray  # int32 [n + 1]
    lengths: np.ndarray  # int32 [n]: start + chunk
    logit_rows: np.ndarray  # int32 [R]: rows whose logits are wanted, ascending


def flatten(plan: StepPlan, limits: Limits) -> Ragged:
    """Raises PlanError before anything is written."""
    for pair in plan.copies:
        if not all(0 <= block < limits.num_blocks for block in pair):
            raise PlanError("a copied block is outside the pool")
    for item in plan.items:
        _check_item(item, limits)
    counts = [len(item.token_ids) for item in plan.items]
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    token_ids = np.fromiter((t for item in plan.items for t in item.token_ids), np.int32, int(offsets[-1]))
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= limits.vocab_size):
        raise PlanError("a token id is outside the vocabulary")
    positions = np.empty(token_ids.size, np.int32)
    slots = np.empty(token_ids.size, np.int64)
    rows = []
    for i, item in enumerate(plan.items):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        positions[begin:end] = span = np.arange(item.start, item.start + counts[i])
        blocks = np.asarray(item.block_table, np.int64)
        slots[begin:end] = blocks[span // limits.block_size] * limits.block_size + span % limits.block_size
        rows.append(np.arange(end - item.num_logits, end, dtype=np.int32))
    return Ragged(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        offsets=offsets,
        lengths=np.array([item.start + n for item, n in zip(plan.items, counts, strict=True)], np.int32),
        logit_rows=np.concatenate(rows) if rows else np.empty(0, np.int32),
    )


def _check_item(item: StepItem, limits: Limits) -> None:
    count = len(item.token_ids)
    end = item.start + count
    if count == 0 or item.start < 0 or not 0 <= item.num_logits <= count:
        raise PlanError("a chunk is empty, starts before 0 or wants more logits than it has tokens")
    if end > limits.max_positions:
        raise PlanError("a chunk ends beyond the model's positions")
    if len(item.block_table) * limits.block_size < end:
        raise PlanError("a block table does not cover its chunk")
    if not all(0 <= block < limits.num_blocks for block in item.block_table):
        raise PlanError("a block table names a block outside the pool")
    for visual in item.visuals:
        if visual.start < 0 or visual.start + len(visual.rows) > count:
            raise PlanError("visual rows lie outside their chunk")
        if tuple(visual.rows.shape[1:]) != (limits.d_model,):
            raise PlanError("visual rows are not as wide as the model")
