"""How native.cpp sees the model: its structs, and weights packed as it reads them."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llm.decoder import LayerWeights

Storage = Literal["float32", "bfloat16", "float16"]
WeightStorage = Literal["auto", "float32", "bfloat16", "float16"]

KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sixteen bfloat16 columns are stored interleaved: see native.cpp.
_INTERLEAVED = [i // 2 + 8 * (i % 2) for i in range(16)]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("window", ctypes.c_int64),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(LayerStruct)),
        *((name, ctypes.c_void_p) for name in ("norm", "cos", "sin")),
        ("head", LinearStruct),
        ("pool", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("num_layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "kv_kind")
        ),
        ("eps", ctypes.c_float),
    ]


class StepStruct(ctypes.Structure):
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


class Packer:
    """Lays weights out as native.cpp reads them, and keeps them alive."""

    def __init__(self, storage: WeightStorage) -> None:
        self._storage = storage
        self._kept: list[np.ndarray] = []
        self.linear_bytes = 0

    def layer(self, w: LayerWeights, window: int) -> LayerStruct:
        return LayerStruct(
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
        copy = aligned(tensor.numel(), np.float32, zero=False)
        copy[:] = tensor.to(torch.float32).numpy().ravel()
        self._kept.append(copy)
        return int(copy.ctypes.data)

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearStruct:
        """[out, in] becomes [out / 16][in][16], padded with zero outputs."""
        n, k = weight.shape
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, padded(n) - n))
        storage = self._storage if self._storage != "auto" else lossless_storage(weight)
        groups = torch.nn.functional.pad(weight, (0, 0, 0, padded(n) - n)).to(_TORCH[storage])
        groups = groups.view(-1, 16, k).transpose(1, 2)
        if storage == "bfloat16":
            groups = groups[:, :, _INTERLEAVED]
        view = groups.contiguous() if storage == "float32" else groups.contiguous().view(torch.int16)
        packed = aligned(view.numel(), np.float32 if storage == "float32" else np.int16, zero=False)
        packed[:] = view.numpy().ravel()
        self._kept.append(packed)
        self.linear_bytes += packed.nbytes
        return LinearStruct(
            weight=packed.ctypes.data, bias=self.vector(bias), n=n, k=k, kind=KINDS[storage], unused=0
        )


def lossless_storage(weight: Tensor) -> Storage:
    same = torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)
    return "bfloat16" if same else "float32"


def _pad_halves(joined: Tensor) -> Tensor:
    """Gate and up, [2 n, ...], each padded to a multiple of 16 outputs."""
    halves = joined.unflatten(0, (2, -1))
    missing = padded(halves.shape[1]) - halves.shape[1]
    tail = (0, 0) * (halves.ndim - 2)
    return torch.nn.functional.pad(halves, (*tail, 0, missing)).flatten(0, 1)


def padded(count: int) -> int:
    return -(-count // 16) * 16


def aligned(count: int, dtype: Any, zero: bool = True) -> np.ndarray:
    """A flat array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(count * size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count * size].view(dtype)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # faster than .ctypes.data
