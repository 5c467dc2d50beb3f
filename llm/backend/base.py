"""The one seam between bookkeeping and the device: a step plan in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class VisualSlice:
    """Chunk positions [start, start + len(rows)) take these embeddings instead of their token's."""

    start: int  # relative to the chunk
    rows: Any  # backend's own array type, [length, DecoderConfig.row_width]


@dataclass(frozen=True, slots=True)
class StepItem:
    """One sequence's chunk: tokens at positions [start, start + len(token_ids))."""

    token_ids: tuple[int, ...]
    start: int  # tokens already in the KV cache
    block_table: tuple[int, ...]  # covers start + len(token_ids) positions
    num_logits: int  # logits are wanted for the chunk's last num_logits positions; 0: none
    visuals: tuple[VisualSlice, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    """Intervals of positions that see each other, later ones too; each ends inside the chunk."""
    rope: np.ndarray | None = field(default=None, compare=False)
    """int32 [3, len(token_ids)] of `llm.rope_positions`; None: each position's own."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    items: tuple[StepItem, ...]
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks, copied before the items run

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


class Backend(Protocol):
    """Owns the weights and the KV pool of `num_blocks` blocks of `block_size` positions.

    Reference: vLLM's split of scheduler and model runner, reduced to plain values.
    """

    block_size: int
    num_blocks: int
    vocab_size: int
    max_positions: int
    whole_spans: bool  # positions of one image span see each other: a chunk must not end inside one

    def count_progress(self, ticks: np.ndarray) -> None:
        """From now on `execute` adds to `ticks` (int64 [1]) from inside, at least once a layer."""
        ...

    def execute(self, plan: StepPlan) -> np.ndarray:
        """Writes the KV of every item and returns float32 logits [sum of num_logits, vocab_size],
        rows in item order, then position order."""
        ...

    def swap_out(self, blocks: tuple[int, ...]) -> Any:
        """Copies blocks to host memory and returns a handle for `swap_in`."""
        ...

    def swap_in(self, handle: Any, blocks: tuple[int, ...]) -> None:
        """Restores a handle's content into these blocks (as many as were swapped out)."""
        ...
