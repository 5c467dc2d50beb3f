"""A step's numbers in one int32 buffer: filled on the host, sent in one copy, read on the device as views.

Letters in shapes: T rows, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from llm.backend.cuda.paged_attention import IDLE, TILE_ROWS
from llm.backend.ragged import Ragged

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a buffer has room for. A captured step has fixed ones; what a step leaves over is padding."""

    rows: int
    sequences: int
    width: int  # blocks of the longest table
    tiles: int
    logits: int
    tile_rows: int
    rope_axes: int = 0  # 3 where rope turns on axes of its own

    @staticmethod
    def of(ragged: Ragged) -> StepSizes:
        counts = np.diff(ragged.offsets)
        tile_rows = 1 if counts.max() == 1 else TILE_ROWS
        return StepSizes(
            rows=len(ragged.token_ids),
            sequences=len(counts),
            width=int(np.diff(ragged.block_start).max()),
            tiles=int((-(-counts // tile_rows)).sum()),
            logits=len(ragged.logit_rows),
            tile_rows=tile_rows,
            rope_axes=0 if ragged.rope is None else 3,
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            "token_ids": (self.rows,),
            "positions": (self.rows,),
            "slots": (self.rows,),
            "visible": (self.rows,),
            "offsets": (self.sequences + 1,),
            "lengths": (self.sequences,),
            "tables": (self.sequences, self.width),
            "tiles": (self.tiles, 2),
            "logit_rows": (self.logits,),
            "rope": (self.rope_axes, self.rows),
        }

    @property
    def total(self) -> int:
        """int32 numbers."""
        return sum(prod(shape) for shape in self.shapes.values())

    def views(self, buffer: Array) -> dict[str, Array]:
        """Parts of a buffer of `total` numbers, by name."""
        parts, at = {}, 0
        for name, shape in self.shapes.items():
            parts[name] = buffer[at : at + prod(shape)].reshape(shape)
            at += prod(shape)
        return parts


def tiles_of(offsets: np.ndarray, tile_rows: int) -> np.ndarray:
    """int32 [n, 2]: sequence and first row of each tile; no tile has rows of two sequences."""
    counts = np.diff(offsets)
    num_tiles = -(-counts // tile_rows)
    sequence = np.repeat(np.arange(len(counts)), num_tiles)
    first_tile = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    row = offsets[sequence] + (np.arange(len(sequence)) - first_tile) * tile_rows
    return np.stack([sequence, row], 1).astype(np.int32)


def fill(parts: Mapping[str, np.ndarray], ragged: Ragged, sizes: StepSizes, spare_slot: int) -> None:
    """Writes a step into a buffer's parts. Rows of padding write their KV to `spare_slot`, which is
    nobody's, and attend to nothing.

    parts: of a buffer with room for the step, `sizes` being the buffer's.
    """
    for part in parts.values():
        part[...] = 0
    rows, sequences = len(ragged.token_ids), len(ragged.lengths)
    parts["token_ids"][:rows] = ragged.token_ids
    parts["positions"][:rows] = ragged.positions
    parts["slots"][:rows] = ragged.slots
    parts["slots"][rows:] = spare_slot
    parts["visible"][:rows] = ragged.positions + 1 if ragged.visible is None else ragged.visible
    parts["offsets"][: sequences + 1] = ragged.offsets
    parts["offsets"][sequences + 1 :] = rows
    parts["lengths"][:sequences] = ragged.lengths
    for i in range(sequences):
        blocks = ragged.blocks[ragged.block_start[i] : ragged.block_start[i + 1]]
        parts["tables"][i, : len(blocks)] = blocks
    tiles = tiles_of(ragged.offsets, sizes.tile_rows)
    parts["tiles"][: len(tiles)] = tiles
    parts["tiles"][len(tiles) :, 0] = IDLE
    parts["logit_rows"][: len(ragged.logit_rows)] = ragged.logit_rows
    if sizes.rope_axes:
        parts["rope"][:, :rows] = ragged.positions if ragged.rope is None else ragged.rope


class Staging:
    """Pinned host buffers that take turns, so that a step is written while the copy before it may still
    run; each is waited for before it is written again."""

    def __init__(self, device: torch.device, copies: Copies | None = None, turns: int = 2) -> None:
        self._copies = copies or Copies(device)
        self._buffers: list[np.ndarray | None] = [None] * turns
        self._pending: list[Pending | None] = [None] * turns
        self._turn = 0

    def send(self, ragged: Ragged, sizes: StepSizes, spare_slot: int, target: Tensor) -> None:
        """One copy of a step into `target`, int32 [sizes.total] on the device; doesn't wait for it."""
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        if (pending := self._pending[turn]) is not None:
            pending.synchronize()
        buffer = self._buffers[turn]
        if buffer is None or len(buffer) < sizes.total:
            buffer = self._buffers[turn] = self._copies.pinned(sizes.total)
        buffer = buffer[: sizes.total]
        fill(sizes.views(buffer), ragged, sizes, spare_slot)
        self._pending[turn] = self._copies.start(buffer, target)


class Pending:
    """A copy under way, where no device counts: nothing to wait for."""

    def synchronize(self) -> None: ...


class Copies:
    """Copies to one device that don't wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def pinned(self, count: int) -> np.ndarray:
        """int32 [count]."""
        return torch.empty(count, dtype=torch.int32, pin_memory=self._on_gpu).numpy()

    def start(self, host: np.ndarray, target: Tensor) -> Pending:
        target.copy_(torch.from_numpy(host), non_blocking=True)
        if not self._on_gpu:
            return Pending()
        event = torch.cuda.Event()
        event.record()
        return event  # type: ignore[return-value]
