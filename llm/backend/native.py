"""The decoder as one C++ call per step, on x86-64 CPUs.

Same contract as TorchBackend. Results are batch invariant: a row's logits are bitwise the same alone, in any
batch and for any chunking, since every value is summed in one order (see native.cpp).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llm.backend.base import StepPlan
from llm.backend.native_build import load_library
from llm.backend.ragged import Limits, Ragged, flatten
from llm.config import DecoderConfig
from llm.decoder import DecoderWeights, LayerWeights, rope_table

Storage = Literal["float32", "bfloat16", "float16"]
WeightStorage = Literal["auto", "float32", "bfloat16", "float16"]

PAGE = 16  # positions; a block is one page or several
_KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sixteen bfloat16 columns are stored interleaved: see native.cpp.
_INTERLEAVED = [i // 2 + 8 * (i % 2) for i in range(16)]


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        ("window", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("norm", "cos", "sin")),
        ("head", _Linear),
        ("pool", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("num_layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "kv_kind")
        ),
        ("eps", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "positions",
                "slots",
                "offsets",
                "wanted",
                "pages",
                "page_start",
                "logits",
                "work",
            )
        ),
        ("num_tokens", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """KV of swapped-out blocks: [layers, n, elements of a block]."""

    data: np.ndarray


class NativeBackend:
    """Float32 arithmetic; `weights` and `kv` name what they are stored as.

    Weight storage `auto` keeps bfloat16 wherever that loses nothing (a bfloat16 checkpoint) and float32
    elsewhere, so results don't depend on it. One thread; `execute` releases the GIL for the whole step, and
    it and the swaps must be called from one thread at a time.

    Raises NativeUnavailable where the machine lacks AVX2 or a compiler, ValueError for a block size that is
    no multiple of 16.
    """

    batch_invariant = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        weight_storage: WeightStorage = "auto",
        kv_storage: Storage = "float32",
    ) -> None:
        if block_size % PAGE:
            raise ValueError("the native backend's block size is a multiple of 16")
        self.config = config
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = config.vocab_size
        self.max_positions = min(config.max_positions, num_blocks * block_size)
        self._limits = Limits(block_size, num_blocks, self.vocab_size, self.max_positions, config.d_model)
        self._library = load_library()
        self._library.work_floats.restype = self._library.page_elements.restype = ctypes.c_int64
        self._library.work_floats.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._packer = _Packer(weight_storage)
        self._model = self._describe(weights, kv_storage)
        self._embedding = _embedding_table(weights.embedding)
        self._pool = self._make_pool(kv_storage)
        self._model.pool = self._pool.ctypes.data
        self._work = _aligned(0, np.float32)

    @property
    def weight_bytes(self) -> int:
        """Stored bytes that one decode step reads: every linear and the head."""
        return self._packer.linear_bytes

    def _describe(self, weights: DecoderWeights, kv_storage: Storage) -> _Model:
        c = self.config
        cos, sin = rope_table(c.rope, self.max_positions, torch.device("cpu"), torch.float32)
        half = c.head_dim // 2
        self._layers = (_Layer * c.num_layers)(
            *(self._packer.layer(w, window) for w, window in zip(weights.layers, c.windows, strict=True))
        )
        return _Model(
            layers=self._layers,
            norm=self._packer.vector(weights.norm),
            cos=self._packer.vector(cos[:, 0, half:]),
            sin=self._packer.vector(sin[:, 0, half:]),
            head=self._packer.linear(weights.lm_head, None),
            num_pages=self.num_blocks * self.block_size // PAGE,
            num_layers=c.num_layers,
            d_model=c.d_model,
            d_ff=c.d_ff,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            kv_kind=_KINDS[kv_storage],
            eps=c.norm_eps,
        )

    def _make_pool(self, kv_storage: Storage) -> np.ndarray:
        """[layers, blocks, elements of a block]; 16-bit storage is seen as uint16."""
        page = self._library.page_elements(ctypes.byref(self._model))
        shape = (self.config.num_layers, self.num_blocks, self.block_size // PAGE * page)
        dtype = np.float32 if kv_storage == "float32" else np.uint16
        return _aligned(int(np.prod(shape)), dtype).reshape(shape)

    def execute(self, plan: StepPlan) -> np.ndarray:
        """See Backend. Raises PlanError for a plan out of bounds, before anything is written."""
        ragged = flatten(plan, self._limits)
        for source, target in plan.copies:
            self._pool[:, target] = self._pool[:, source]
        num_rows = ragged.logit_rows.size
        logits = _aligned(num_rows * _padded(self.vocab_size), np.float32, zero=False)
        logits = logits.reshape(num_rows, -1) if num_rows else np.empty((0, self.vocab_size), np.float32)
        if plan.items:
            self._run(plan, ragged, logits)
        return np.ascontiguousarray(logits[:, : self.vocab_size])

    def _run(self, plan: StepPlan, ragged: Ragged, logits: np.ndarray) -> None:
        x = self._embed(plan, ragged)
        pages, page_start = self._pages(ragged)
        needed = self._library.work_floats(ctypes.byref(self._model), len(x))
        if self._work.size < needed:
            self._work = _aligned(needed, np.float32, zero=False)
        step = _Step(
            x=_address(x),
            positions=_address(ragged.positions),
            slots=_address(ragged.slots),
            offsets=_address(ragged.offsets),
            wanted=_address(ragged.num_logits),
            pages=_address(pages),
            page_start=_address(page_start),
            logits=_address(logits),
            work=_address(self._work),
            num_tokens=len(x),
            num_items=len(plan.items),
        )
        self._library.execute(ctypes.byref(self._model), ctypes.byref(step))

    def _embed(self, plan: StepPlan, ragged: Ragged) -> np.ndarray:
        """float32 [T, d_model]."""
        x = _widened(self._embedding[ragged.token_ids])
        for item, offset in zip(plan.items, ragged.offsets, strict=False):
            for visual in item.visuals:
                first = int(offset) + visual.start
                x[first : first + len(visual.rows)] = _as_float32(visual.rows)
        return x

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

    def swap_out(self, blocks: tuple[int, ...]) -> SwappedBlocks:
        return SwappedBlocks(self._pool[:, list(blocks)])

    def swap_in(self, handle: SwappedBlocks, blocks: tuple[int, ...]) -> None:
        """Raises ValueError when the handle holds another number of blocks."""
        if handle.data.shape[1] != len(blocks):
            raise ValueError("a swapped-out handle goes back into as many blocks as it came from")
        self._pool[:, list(blocks)] = handle.data


class _Packer:
    """Lays weights out as native.cpp reads them, and keeps them alive."""

    def __init__(self, storage: WeightStorage) -> None:
        self._storage = storage
        self._kept: list[np.ndarray] = []
        self.linear_bytes = 0

    def layer(self, w: LayerWeights, window: int) -> _Layer:
        return _Layer(
            attention_norm=self.vector(w.attention_norm),
            q_norm=self.vector(w.q_norm),
            k_norm=self.vector(w.k_norm),
            mlp_norm=self.vector(w.mlp_norm),
            qkv=self.linear(w.qkv, w.qkv_bias),
            out=self.linear(w.out, w.out_bias),
            gate_up=self.linear(
                _pad_halves(w.gate_up), None if w.gate_up_bias is None else _pad_halves(w.gate_up_bias)
            ),
            down=self.linear(w.down, w.down_bias),
            window=window,
        )

    def vector(self, tensor: Tensor | None) -> int | None:
        """Address of a float32 copy."""
        if tensor is None:
            return None
        copy = _aligned(tensor.numel(), np.float32, zero=False)
        copy[:] = tensor.to(torch.float32).numpy().ravel()
        self._kept.append(copy)
        return int(copy.ctypes.data)

    def linear(self, weight: Tensor, bias: Tensor | None) -> _Linear:
        """[out, in] becomes [out / 16][in][16], padded with zero outputs."""
        n, k = weight.shape
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, _padded(n) - n))
        storage = self._storage if self._storage != "auto" else _lossless_storage(weight)
        groups = torch.nn.functional.pad(weight, (0, 0, 0, _padded(n) - n)).to(_TORCH[storage])
        groups = groups.view(-1, 16, k).transpose(1, 2)
        if storage == "bfloat16":
            groups = groups[:, :, _INTERLEAVED]
        view = groups.contiguous() if storage == "float32" else groups.contiguous().view(torch.int16)
        packed = _aligned(view.numel(), np.float32 if storage == "float32" else np.int16, zero=False)
        packed[:] = view.numpy().ravel()
        self._kept.append(packed)
        self.linear_bytes += packed.nbytes
        return _Linear(
            weight=packed.ctypes.data, bias=self.vector(bias), n=n, k=k, kind=_KINDS[storage], unused=0
        )


def _lossless_storage(weight: Tensor) -> Storage:
    same = torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)
    return "bfloat16" if same else "float32"


def _pad_halves(joined: Tensor) -> Tensor:
    """Gate and up, [2 n, ...], each padded to a multiple of 16 outputs."""
    halves = joined.unflatten(0, (2, -1))
    missing = _padded(halves.shape[1]) - halves.shape[1]
    tail = (0, 0) * (halves.ndim - 2)
    return torch.nn.functional.pad(halves, (*tail, 0, missing)).flatten(0, 1)


def _padded(count: int) -> int:
    return -(-count // 16) * 16


def _aligned(count: int, dtype: Any, zero: bool = True) -> np.ndarray:
    """A flat array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(count * size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count * size].view(dtype)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # faster than .ctypes.data


def _embedding_table(embedding: Tensor) -> np.ndarray:
    """float32, or bfloat16 seen as uint16 where that loses nothing."""
    if _lossless_storage(embedding) == "bfloat16":
        return embedding.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return embedding.to(torch.float32).numpy()


def _widened(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def _as_float32(rows: Any) -> np.ndarray:
    return rows.detach().to("cpu", torch.float32).numpy() if isinstance(rows, Tensor) else np.asarray(rows)
