"""Logits that stay on the device: of each row what greedy decoding needs is copied, the rest on demand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

NUM_TOP = 64
"""Logits of a row that are at hand beside the likeliest one: a top-k of up to so many needs no full row."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step leaves on the device; a captured one leaves it in the same memory each time."""

    logits: Tensor  # [R, vocab_size]
    best: Tensor  # int64 [R]
    usable: Tensor  # bool [R]: the likeliest logit is a number

    @staticmethod
    def of(logits: Tensor) -> Outputs:
        best = logits.argmax(-1) if logits.shape[0] else logits.new_empty(0, dtype=torch.int64)
        return Outputs(logits, best, logits.gather(1, best[:, None]).isfinite()[:, 0])


class DeviceLogits:
    """`llm.backend.base.Logits` of rows [first, end) of a step's outputs. Valid until the next step."""

    def __init__(self, outputs: Outputs, first: int, end: int) -> None:
        self._outputs = outputs
        self._first, self._end = first, end

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> DeviceLogits: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | DeviceLogits:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return DeviceLogits(self._outputs, self._first + start, self._first + max(start, stop))
        row = range(self._first, self._end)[index]
        return self._outputs.logits[row].to("cpu", torch.float32).numpy()

    def greedy(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [R], the likeliest token of each row; bool [R], whether its logit is a number)."""
        rows = slice(self._first, self._end)
        both = torch.stack((self._outputs.best[rows], self._outputs.usable[rows].long())).to("cpu").numpy()
        return both[0], both[1].astype(bool)

    def top(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(int64 ids, float32 logits) of a row's `count` largest and of what is as large as the last of
        them, by ascending id; None where more than NUM_TOP would be needed."""
        ids, values = self._top
        row = range(len(self))[index]
        if count >= ids.shape[1] or values[row, count - 1] == values[row, -1]:
            return None
        kept = values[row] >= values[row, count - 1]
        order = np.argsort(ids[row][kept])
        return ids[row][kept][order], values[row][kept][order]

    @cached_property
    def _top(self) -> tuple[np.ndarray, np.ndarray]:
        rows = self._outputs.logits[self._first : self._end]
        values, ids = rows.topk(min(NUM_TOP, rows.shape[1]))
        both = torch.stack((ids.double(), values.double())).to("cpu").numpy()  # ids are exact in it
        return both[0].astype(np.int64), both[1].astype(np.float32)
