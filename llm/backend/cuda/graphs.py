"""Captured decode steps: one per bucket of rows, replayed over static buffers.

A step of few rows costs a GPU less than the host takes to launch its kernels one by one; a graph is one
launch. Reference: vLLM's and mini-sglang's CUDA graphs per batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from llm.backend.cuda.device_logits import Outputs
from llm.backend.cuda.step_batch import StepSizes

SMALL_BUCKETS = (1, 2, 4, 8)
STEP = 8  # rows between larger buckets

Step = Callable[[Tensor, StepSizes], Outputs]


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 ... until one holds `max_rows`."""
    larger = range(2 * STEP, max_rows + STEP, STEP)
    return tuple(b for b in SMALL_BUCKETS if b < max_rows + SMALL_BUCKETS[-1]) + tuple(larger)


Captured = TypeVar("Captured", Outputs, Tensor)


class Recorder(Protocol):
    """Captures a function's kernels, to run them again over the same memory."""

    def capture(self, function: Callable[[], Captured]) -> Captured: ...

    def replay(self) -> None: ...


class CudaRecorder:
    """torch.cuda.CUDAGraph; graphs of one pool share the memory of what lies between their kernels."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, function: Callable[[], Captured]) -> Captured:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # kernels are compiled and libraries set up outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=self._pool):
            return function()

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """Graphs of one-token steps. `width` is that of every table, so that any context length fits."""

    def __init__(
        self,
        step: Step,
        max_rows: int,
        width: int,
        rope_axes: int,
        device: torch.device,
        recorder: Callable[[], Recorder],
    ) -> None:
        self._step = step
        self._device = device
        self._recorder = recorder
        self._sizes = [
            StepSizes(rows, rows, width, rows, rows, tile_rows=1, rope_axes=rope_axes)
            for rows in buckets_up_to(max_rows)
        ]
        self._captured: dict[int, tuple[Tensor, Recorder, Outputs]] = {}

    def sizes_for(self, wanted: StepSizes) -> StepSizes | None:
        """The smallest bucket that holds a step; None for one that isn't of one token a sequence, or is too
        large."""
        if wanted.tile_rows != 1 or wanted.logits != wanted.rows:
            return None
        return next((sizes for sizes in self._sizes if sizes.rows >= wanted.rows), None)

    def run(self, sizes: StepSizes, send: Callable[[Tensor], None]) -> Outputs:
        """`send` copies the step into the bucket's buffer. The bucket is captured when it is first used."""
        if sizes.rows not in self._captured:
            buffer = torch.zeros(sizes.total, dtype=torch.int32, device=self._device)
            send(buffer)
            recorder = self._recorder()
            outputs = recorder.capture(lambda: self._step(buffer, sizes))
            self._captured[sizes.rows] = buffer, recorder, outputs
        buffer, recorder, outputs = self._captured[sizes.rows]
        send(buffer)
        recorder.replay()
        return outputs
