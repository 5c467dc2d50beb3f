"""The one seam between bookkeeping and the device: a step plan in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

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


class Logits(Protocol):
    """float32 logits [R, vocab_size] of a step: an array, or rows that stay on a device until they are read.
    Valid until the next step."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any:
        """A row as float32 [vocab_size] for a number, `Logits` of some for a slice."""
        ...


class RemoteLogits(Logits, Protocol):
    """Logits that are costly to read whole."""

    def greedy(self) -> tuple[np.ndarray, np.ndarray]:
        """As `greedy` below."""
        ...

    def top(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(int64 ids, float32 logits) of a row's `count` largest and of what is as large as the last of
        them, by ascending id; None where the row must be read."""
        ...


def greedy(logits: Logits) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [R], the likeliest token of each row; bool [R], whether its logit is a number)."""
    if not isinstance(logits, np.ndarray):
        return cast(RemoteLogits, logits).greedy()
    if not len(logits):
        return np.empty(0, np.int64), np.empty(0, bool)
    best = logits.argmax(axis=1)
    return best, np.isfinite(logits[np.arange(len(best)), best])  # argmax finds a nan


def largest(logits: Logits, index: int, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """See `RemoteLogits.top`."""
    return None if isinstance(logits, np.ndarray) else cast(RemoteLogits, logits).top(index, count)


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

    def execute(self, plan: StepPlan) -> Logits:
        """Writes the KV of every item and returns logits [sum of num_logits, vocab_size],
        rows in item order, then position order."""
        ...

    def swap_out(self, blocks: tuple[int, ...]) -> Any:
        """Copies blocks to host memory and returns a handle for `swap_in`."""
        ...

    def swap_in(self, handle: Any, blocks: tuple[int, ...]) -> None:
        """Restores a handle's content into these blocks (as many as were swapped out)."""
        ...

    @property
    def kv_layout(self) -> str:
        """Names how `save_blocks` writes: backends of one layout and model read each other's."""
        ...

    def save_blocks(self, blocks: tuple[int, ...]) -> list[bytes]:
        """The content of each block."""
        ...

    def load_blocks(self, saved: list[bytes], blocks: tuple[int, ...]) -> None:
        """Restores what `save_blocks` gave. Raises ValueError for bytes of another length."""
        ...
