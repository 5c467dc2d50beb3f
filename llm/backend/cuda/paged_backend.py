"""The torch backend where attention is one kernel over the paged pool: a GPU's, or Triton's interpreter's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from llm.backend.base import Logits, StepPlan
from llm.backend.cuda.device_logits import DeviceLogits, Outputs
from llm.backend.cuda.graphs import CudaRecorder, DecodeGraphs, Recorder
from llm.backend.cuda.paged_attention import paged_attention
from llm.backend.cuda.step_batch import Copies, Staging, StepSizes
from llm.backend.decoder import DecoderInputs, DecoderWeights
from llm.backend.kv_pool import LayerKv
from llm.backend.ragged import Ragged, flatten
from llm.backend.torch_backend import TorchBackend
from llm.decoder_config import DecoderConfig

MAX_GRAPH_ROWS = 256


class PagedAttention:
    """A step's `llm.backend.decoder.StepAttention`, read from the step's buffer."""

    def __init__(self, parts: dict[str, Tensor], tile_rows: int) -> None:
        self._parts = parts
        self._tile_rows = tile_rows

    def __call__(self, q: Tensor, kv: LayerKv, window: int) -> Tensor:
        """See StepAttention."""
        parts, out = self._parts, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_attention(
            q,
            kv.data,
            kv.scales,
            parts["tiles"],
            parts["offsets"],
            parts["lengths"],
            parts["visible"],
            parts["tables"],
            out,
            window,
            self._tile_rows,
        )
        return out.flatten(1)


class PagedBackend(TorchBackend):
    """Steps whose sequences all decode run as captured graphs where `recorder` captures; others eagerly."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        int8_kv: bool = False,
        recorder: Callable[[], Recorder] | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(
            config, weights, num_blocks=num_blocks, block_size=block_size, int8_kv=int8_kv, spare_blocks=1
        )
        if self.device.type == "cuda" and recorder is None:
            pool = torch.cuda.graph_pool_handle()
            recorder = lambda: CudaRecorder(pool)  # noqa: E731
        self.wait_for_visuals: Callable[[], None] = lambda: None
        self._spare_slot = num_blocks * block_size
        self._staging = Staging(self.device, copies)
        self._rope_axes = 3 if config.rope_axes else 0
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            width = -(-self.max_positions // block_size)
            self._graphs = DecodeGraphs(
                self._forward, MAX_GRAPH_ROWS, width, self._rope_axes, self.device, recorder
            )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Logits:
        """See Backend. Raises PlanError for a plan out of bounds, before anything is written."""
        ragged = flatten(plan, self._limits)
        for source, target in plan.copies:
            self.pool.copy_block(source, target)
        if not plan.items:
            return np.empty((0, self.vocab_size), np.float32)
        sizes = StepSizes.of(ragged)
        visuals = self._visuals(plan, ragged)
        if visuals:
            self.wait_for_visuals()
        bucket = None
        if self._graphs is not None and not visuals:
            bucket = self._graphs.sizes_for(sizes)
        if self._graphs is not None and bucket is not None:
            self.decoder.ticks[0] += self.config.num_layers
            outputs = self._graphs.run(
                bucket, lambda target: self._staging.send(ragged, bucket, self._spare_slot, target)
            )
        else:
            buffer = torch.empty(sizes.total, dtype=torch.int32, device=self.device)
            self._staging.send(ragged, sizes, self._spare_slot, buffer)
            outputs = self._forward(buffer, sizes, visuals)
        return DeviceLogits(outputs, 0, sizes.logits)

    def _visuals(self, plan: StepPlan, ragged: Ragged) -> tuple[tuple[int, Tensor], ...]:
        """Rows of another machine's encoder are copied without waiting."""
        visuals = super()._visuals(plan, ragged)
        if self.device.type == "cpu":
            return visuals
        return tuple(
            (first, rows if rows.is_cuda else rows.pin_memory().to(self.device, non_blocking=True))
            for first, rows in visuals
        )

    def _forward(
        self, buffer: Tensor, sizes: StepSizes, visuals: tuple[tuple[int, Tensor], ...] = ()
    ) -> Outputs:
        """The whole step from its buffer, without a look at any number of it."""
        parts = sizes.views(buffer)
        inputs = DecoderInputs(
            token_ids=parts["token_ids"],
            positions=parts["positions"],
            slots=parts["slots"].long(),
            attention=PagedAttention(parts, sizes.tile_rows),
            logit_rows=parts["logit_rows"],
            visuals=visuals,
            rope=parts["rope"] if sizes.rope_axes else None,
        )
        return Outputs.of(self.decoder.forward(inputs, self.pool))
