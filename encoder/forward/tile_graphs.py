"""Captured forwards over square tiles: one per number of tiles, replayed over static buffers.

Letters in shapes: n tiles of S x S pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

COUNTS = (1, 2, 4, 8, 13)  # 13: a page of 4 x 3 tiles and its thumbnail


class TileRecorder(Protocol):
    """Captures a function's kernels, to run them again over the same memory."""

    def capture(self, function: Callable[[], Tensor]) -> Tensor: ...

    def replay(self) -> None: ...


class TileGraphs:
    """A forward's graphs, each captured when it is first used. Not thread-safe."""

    def __init__(
        self, forward: Callable[[Tensor], Tensor], device: torch.device, recorder: Callable[[], TileRecorder]
    ) -> None:
        """forward: uint8 [n, S, S, 3] on the device to [n, rows of a tile, row_width]."""
        self._forward = forward
        self._device = device
        self._recorder = recorder
        self._captured: dict[tuple[int, ...], tuple[Tensor, TileRecorder, Tensor]] = {}

    def run(self, tiles: np.ndarray) -> Tensor | None:
        """Visual tokens of uint8 tiles [n, S, S, 3], valid until the next call; None for more tiles than the
        largest graph has."""
        count = next((count for count in COUNTS if count >= len(tiles)), None)
        if count is None:
            return None
        pixels = torch.from_numpy(np.ascontiguousarray(tiles))
        if self._device.type == "cuda":
            pixels = pixels.pin_memory()
        shape = (count, *tiles.shape[1:])
        if shape not in self._captured:
            buffer = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            recorder = self._recorder()
            tokens = recorder.capture(lambda: self._forward(buffer))
            self._captured[shape] = buffer, recorder, tokens
        buffer, recorder, tokens = self._captured[shape]
        buffer[: len(tiles)].copy_(pixels, non_blocking=True)
        recorder.replay()
        return tokens[: len(tiles)]
