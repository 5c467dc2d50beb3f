"""The decoder as one C++ call per step, on x86-64 CPUs.

Same contract as TorchBackend. Results are batch invariant: a row's logits are bitwise the same alone, in any
batch and for any chunking, since every value is summed in one order (see native.cpp).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.backend.base import StepPlan
from llm.backend.decoder import DecoderWeights, rope_table
from llm.backend.native_build import levels, load_library
from llm.backend.native_layout import (
    KINDS,
    LayerStruct,
    ModelStruct,
    Packer,
    StepStruct,
    address,
    aligned,
    lossless_storage,
)
from llm.backend.ragged import Limits, Ragged, flatten
from llm.cost.exact_bytes import padded
from llm.decoder_config import DecoderConfig
from llm.storage import KvStorage, WeightOption, embedding_storage

PAGE = 16  # positions; a block is one page or several


@dataclass(frozen=True, slots=True)
class NativeSwap:
    """KV of swapped-out blocks, scales included: [layers, n, elements of a block]."""

    data: np.ndarray


class NativeBackend:
    """Float32 arithmetic; `weight_storage` and `kv_storage` name what weights and KV are kept as.

    Weight storage `auto` keeps bfloat16 wherever that loses nothing (a bfloat16 checkpoint) and float32
    elsewhere, so results don't depend on it; int8 and int4 weights and int8 KV are rounded as
    llm.backend.quantise says, the head of an int4 model to int8 and the token embeddings beside either to
    bfloat16. One thread; `execute` releases the GIL for the whole step, and it and the swaps must be called
    from one thread at a time.

    Raises NativeUnavailable where the CPU is below x86-64-v2 or the library neither ships nor compiles,
    ValueError for a block size that is not a multiple of 16.
    """

    batch_invariant = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        weight_storage: WeightOption = "auto",
        kv_storage: KvStorage = "float32",
    ) -> None:
        if block_size % PAGE:
            raise ValueError("the native backend's block size must be a multiple of 16")
        self.config = config
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = config.vocab_size
        self.whole_spans = config.whole_spans
        self.max_positions = min(config.max_positions, num_blocks * block_size)
        self._limits = Limits(block_size, num_blocks, self.vocab_size, self.max_positions, config.row_width)
        self._library = load_library()
        self._library.work_floats.restype = self._library.page_elements.restype = ctypes.c_int64
        self._library.work_floats.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._packer = Packer(weight_storage)
        self._model = self._describe(weights, kv_storage)
        self._embedding = _embedding_table(weights.embedding, weight_storage)
        self._pool = self._make_pool(kv_storage)
        self._kv_storage = kv_storage
        self._model.pool = self._pool.ctypes.data
        self._work = aligned(0, np.float32)
        self._ticks = np.zeros(1, np.int64)

    def count_progress(self, ticks: np.ndarray) -> None:
        """See Backend."""
        self._ticks = ticks

    @property
    def weight_bytes(self) -> int:
        """Stored bytes that one decode step reads: every linear and the head, with their scales."""
        return self._packer.linear_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of everything but the KV: what a step reads, token embeddings, norms, biases, rope tables."""
        packer = self._packer
        return packer.linear_bytes + packer.vector_bytes + self._rotations.nbytes + self._embedding.nbytes

    @property
    def kv_bytes(self) -> int:
        return self._pool.nbytes

    def _describe(self, weights: DecoderWeights, kv_storage: KvStorage) -> ModelStruct:
        c = self.config
        self._rotations = _rotations(c, self.max_positions)
        self._layers = (LayerStruct * c.num_layers)(
            *(
                self._packer.layer(w, window, rope)
                for w, window, rope in zip(weights.layers, c.windows, c.layer_ropes, strict=True)
            )
        )
        return ModelStruct(
            layers=self._layers,
            norm=self._packer.vector(weights.norm),
            head=self._packer.head(weights.lm_head),
            num_pages=self.num_blocks * self.block_size // PAGE,
            num_layers=c.num_layers,
            d_model=c.d_model,
            d_ff=c.d_ff,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            kv_kind=KINDS[kv_storage],
            activation=int(c.activation == "gelu_tanh"),
            eps=c.norm_eps,
        )

    def _make_pool(self, kv_storage: KvStorage) -> np.ndarray:
        """[layers, blocks, elements of a block]; 16-bit storage is seen as uint16, int8 as bytes."""
        page = self._library.page_elements(ctypes.byref(self._model))
        shape = (self.config.num_layers, self.num_blocks, self.block_size // PAGE * page)
        dtype = {"float32": np.float32, "int8": np.uint8}.get(kv_storage, np.uint16)
        return aligned(int(np.prod(shape)), dtype).reshape(shape)

    def execute(self, plan: StepPlan) -> np.ndarray:
        """See Backend. Raises PlanError for a plan out of bounds, before anything is written."""
        ragged = flatten(plan, self._limits)
        for source, target in plan.copies:
            self._pool[:, target] = self._pool[:, source]
        num_rows = ragged.logit_rows.size
        logits = aligned(num_rows * padded(self.vocab_size), np.float32, zero=False)
        logits = logits.reshape(num_rows, -1) if num_rows else np.empty((0, self.vocab_size), np.float32)
        if plan.items:
            self._run(plan, ragged, logits)
        return np.ascontiguousarray(logits[:, : self.vocab_size])

    def _run(self, plan: StepPlan, ragged: Ragged, logits: np.ndarray) -> None:
        x = self._embed(plan, ragged)
        cos, sin = np.ascontiguousarray(self._turns(ragged))
        pages, page_start = self._pages(ragged)
        needed = self._library.work_floats(ctypes.byref(self._model), len(x))
        if self._work.size < needed:
            self._work = aligned(needed, np.float32, zero=False)
        added, added_rows = self._added(plan, ragged)
        step = StepStruct(
            x=address(x),
            added=address(added),
            added_rows=address(added_rows),
            positions=address(ragged.positions),
            visible=None if ragged.visible is None else address(ragged.visible),
            cos=address(cos),
            sin=address(sin),
            slots=address(ragged.slots),
            offsets=address(ragged.offsets),
            wanted=address(ragged.num_logits),
            pages=address(pages),
            page_start=address(page_start),
            logits=address(logits),
            work=address(self._work),
            ticks=address(self._ticks),
            num_tokens=len(x),
            num_items=len(plan.items),
            num_added=len(added_rows),
            added_layers=self.config.deepstack,
        )
        self._library.execute(ctypes.byref(self._model), ctypes.byref(step))

    def _turns(self, ragged: Ragged) -> np.ndarray:
        """Cosines and sines of every row, float32 [2, ropes, T, D / 2]."""
        axes = self.config.rope_axes
        if ragged.rope is None or not axes:
            return self._rotations[:, :, ragged.positions]
        return self._rotations[:, :, ragged.rope[list(axes)].T, np.arange(len(axes))]

    def _embed(self, plan: StepPlan, ragged: Ragged) -> np.ndarray:
        """float32 [T, d_model]."""
        x = _widened(self._embedding[ragged.token_ids])
        if self.config.embedding_scale != 1.0:
            x = x * np.float32(self.config.embedding_scale)
        for item, offset in zip(plan.items, ragged.offsets, strict=False):
            for visual in item.visuals:
                first = int(offset) + visual.start
                x[first : first + len(visual.rows)] = _as_float32(visual.rows)[:, : self.config.d_model]
        return x

    def _added(self, plan: StepPlan, ragged: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """(float32 [V, deepstack, d_model] that layers add, int32 [V] the rows that they add it to)."""
        d, rows, added = self.config.d_model, [np.empty(0, np.int32)], [np.empty((0, 1), np.float32)]
        if self.config.deepstack:
            added = [np.empty((0, d * self.config.deepstack), np.float32)]
            for item, offset in zip(plan.items, ragged.offsets, strict=False):
                for visual in item.visuals:
                    first = int(offset) + visual.start
                    rows.append(np.arange(first, first + len(visual.rows), dtype=np.int32))
                    added.append(_as_float32(visual.rows)[:, d:])
        return np.concatenate(added), np.concatenate(rows)

    def _pages(self, ragged: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """int32 pages of all items, int64 [n + 1] where each item's begin."""
        per_block = self.block_size // PAGE
        if per_block == 1:
            return ragged.blocks, ragged.block_start
        pages = ragged.blocks[:, None] * np.int32(per_block) + np.arange(per_block, dtype=np.int32)
        return pages.ravel(), ragged.block_start * per_block

    def embedding(self) -> np.ndarray:
        """float32 [vocab_size, d_model]."""
        return _widened(self._embedding[:])

    def swap_out(self, blocks: tuple[int, ...]) -> NativeSwap:
        return NativeSwap(self._pool[:, list(blocks)])

    def swap_in(self, handle: NativeSwap, blocks: tuple[int, ...]) -> None:
        """Raises ValueError when the handle holds another number of blocks."""
        if handle.data.shape[1] != len(blocks):
            raise ValueError("a swapped-out handle must go back into as many blocks as it came from")
        self._pool[:, list(blocks)] = handle.data

    @property
    def kv_layout(self) -> str:
        return f"native {levels()[0]} {self._kv_storage} {self._pool.shape[0]}x{self._pool.shape[2:]}"

    def save_blocks(self, blocks: tuple[int, ...]) -> list[bytes]:
        return [self._pool[:, block].tobytes() for block in blocks]

    def load_blocks(self, saved: list[bytes], blocks: tuple[int, ...]) -> None:
        """Raises ValueError for bytes of another length."""
        shape = (self._pool.shape[0], *self._pool.shape[2:])
        contents = [np.frombuffer(data, self._pool.dtype).reshape(shape) for data in saved]
        for content, block in zip(contents, blocks, strict=True):
            self._pool[:, block] = content


def _rotations(config: DecoderConfig, num_positions: int) -> np.ndarray:
    """float32 [2, ropes, positions, D / 2]: cosines and sines."""
    half = config.head_dim // 2
    tables = [rope_table(rope, num_positions, torch.device("cpu"), torch.float32) for rope in config.ropes]
    return torch.stack([torch.stack([pair[i][:, 0, half:] for pair in tables]) for i in range(2)]).numpy()


def _embedding_table(embedding: Tensor, storage: WeightOption) -> np.ndarray:
    """float32, or bfloat16 seen as uint16: see `embedding_storage`."""
    if embedding_storage(storage, lossless_storage(embedding)) == "bfloat16":
        return embedding.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return embedding.to(torch.float32).numpy()


def _widened(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def _as_float32(rows: Any) -> np.ndarray:
    return rows.detach().to("cpu", torch.float32).numpy() if isinstance(rows, Tensor) else np.asarray(rows)
