"""The decoder on any device and dtype torch has: the reference for the other backends."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm.backend.base import Logits, StepPlan
from llm.backend.decoder import Decoder, DecoderInputs, DecoderWeights
from llm.backend.kv_pool import KvPool, TensorSwap
from llm.backend.ragged import Limits, Ragged, flatten
from llm.backend.span_attention import SpanAttention
from llm.decoder_config import DecoderConfig


class TorchBackend:
    """Weights and KV pool on one device, the pool in the weights' dtype or, with `int8_kv`, in 8 bits.

    `execute` and the swaps must be called from one thread at a time.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        int8_kv: bool = False,
        spare_blocks: int = 0,
    ) -> None:
        """`spare_blocks`: of the pool's, beyond those that plans may name."""
        self.config = config
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = config.vocab_size
        self.whole_spans = config.whole_spans
        self.max_positions = min(config.max_positions, num_blocks * block_size)
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.decoder = Decoder(config, weights, self.max_positions)
        self.pool = KvPool(
            config, num_blocks + spare_blocks, block_size, self.device, self.dtype, int8=int8_kv
        )
        self._limits = Limits(block_size, num_blocks, config.vocab_size, self.max_positions, config.row_width)

    def count_progress(self, ticks: np.ndarray) -> None:
        """See Backend."""
        self.decoder.ticks = ticks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Logits:
        """See Backend. Raises PlanError for a plan out of bounds, before anything is written."""
        ragged = flatten(plan, self._limits)
        for source, target in plan.copies:
            self.pool.copy_block(source, target)
        if not plan.items:
            return np.empty((0, self.vocab_size), np.float32)
        logits = self.decoder.forward(self._batch(plan, ragged), self.pool)
        return logits.to("cpu", torch.float32).numpy()

    def _batch(self, plan: StepPlan, ragged: Ragged) -> DecoderInputs:
        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, torch.int64)

        return DecoderInputs(
            token_ids=on_device(ragged.token_ids),
            positions=on_device(ragged.positions),
            slots=on_device(ragged.slots),
            attention=SpanAttention(ragged, self.config, self.block_size, self.device),
            logit_rows=on_device(ragged.logit_rows),
            visuals=self._visuals(plan, ragged),
            rope=None if ragged.rope is None else on_device(ragged.rope),
        )

    def _visuals(self, plan: StepPlan, ragged: Ragged) -> tuple[tuple[int, Tensor], ...]:
        return tuple(
            (int(ragged.offsets[i]) + visual.start, torch.as_tensor(visual.rows))
            for i, item in enumerate(plan.items)
            for visual in item.visuals
        )

    @property
    def kv_bytes(self) -> int:
        return self.pool.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads: every linear and the head."""
        w = self.decoder.weights
        layers = sum(
            t.nbytes for layer in w.layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return layers + w.lm_head.nbytes

    def embedding(self) -> np.ndarray:
        """float32 [vocab_size, d_model]."""
        return self.decoder.weights.embedding.to("cpu", torch.float32).numpy()

    def swap_out(self, blocks: tuple[int, ...]) -> TensorSwap:
        return self.pool.swap_out(blocks)

    def swap_in(self, handle: TensorSwap, blocks: tuple[int, ...]) -> None:
        """Raises ValueError when the handle holds another number of blocks."""
        self.pool.swap_in(handle, blocks)

    @property
    def kv_layout(self) -> str:
        return self.pool.layout

    def save_blocks(self, blocks: tuple[int, ...]) -> list[bytes]:
        return self.pool.save(blocks)

    def load_blocks(self, saved: list[bytes], blocks: tuple[int, ...]) -> None:
        """Raises ValueError for bytes of another length."""
        self.pool.load(saved, blocks)
