"""How native.cpp and its headers see the model: their structs, and weights packed as they read them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.backend.decoder import LayerWeights
from llm.backend.quantise import quantise_int4, quantise_int8
from llm.cost.exact_bytes import padded
from llm.storage import WeightOption, WeightStorage, head_storage

KINDS: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sixteen bfloat16 columns are stored interleaved: see native_lanes.h.
_INTERLEAVED = [i // 2 + 8 * (i % 2) for i in range(16)]


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("post_attention_norm", "post_mlp_norm")),
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("window", ctypes.c_int64),
        ("rope", ctypes.c_int64),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("head", LinearStruct),
        ("pool", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("num_layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "kv_kind")
        ),
        ("activation", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "positions",
                "visible",
                "cos",
                "sin",
                "slots",
                "offsets",
                "wanted",
                "pages",
                "page_start",
                "logits",
                "work",
                "ticks",
                "added",
                "added_rows",
            )
        ),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_items", "num_added", "added_layers")),
    ]


class Packer:
    """Lays weights out as native.cpp reads them, keeps them alive and counts their bytes."""

    def __init__(self, storage: WeightOption) -> None:
        self._storage = storage
        self._kept: list[np.ndarray] = []
        self.linear_bytes = 0  # weights of linears and head with their scales
        self.vector_bytes = 0  # norms and biases

    def layer(self, w: LayerWeights, window: int, rope: int) -> LayerStruct:
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
            rope=rope,
            post_attention_norm=self.vector(w.post_attention_norm),
            post_mlp_norm=self.vector(w.post_mlp_norm),
        )

    def vector(self, tensor: Tensor | None) -> int | None:
        """Address of a float32 copy."""
        if tensor is None:
            return None
        self.vector_bytes += tensor.numel() * 4
        return self._keep(tensor.to(torch.float32))

    def head(self, weight: Tensor) -> LinearStruct:
        return self.linear(weight, None, head_storage(self._storage))

    def _keep(self, values: Tensor) -> int:
        """Address of a copy on a cache line of its own."""
        array = values.contiguous().numpy()
        copy = aligned(array.size, array.dtype, zero=False)
        copy[:] = array.ravel()
        self._kept.append(copy)
        return int(copy.ctypes.data)

    def linear(
        self, weight: Tensor, bias: Tensor | None, storage: WeightOption | None = None
    ) -> LinearStruct:
        """[out, in] becomes [out / 16][in][16], or int4's blocks, padded with zero outputs."""
        n, k = weight.shape
        storage = storage or self._storage
        kind: WeightStorage = lossless_storage(weight) if storage == "auto" else storage
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, padded(n) - n))
        packed, scale = _packed(torch.nn.functional.pad(weight, (0, 0, 0, padded(n) - n)), kind)
        self.linear_bytes += packed.nbytes + (0 if scale is None else scale.nbytes)
        return LinearStruct(
            weight=self._keep(packed),
            bias=self.vector(bias),
            scale=None if scale is None else self._keep(scale),
            n=n,
            k=k,
            kind=KINDS[kind],
            unused=0,
        )


def _packed(weight: Tensor, storage: WeightStorage) -> tuple[Tensor, Tensor | None]:
    """[n, k] with n a multiple of 16 as native_product.h reads it, and int8's scales [n]."""
    if storage == "int4":
        return _int4_blocks(weight), None
    if storage == "int8":
        values, scale = quantise_int8(weight)
        return _column_groups(values), scale
    columns = _column_groups(weight.to(_TORCH[storage]))
    if storage == "bfloat16":
        columns = columns[:, :, _INTERLEAVED]
    return (columns if storage == "float32" else columns.contiguous().view(torch.int16)), None


def _column_groups(weight: Tensor) -> Tensor:
    """[n, k] -> [n / 16, k, 16]."""
    return weight.unflatten(0, (-1, 16)).transpose(1, 2)


def _int4_blocks(weight: Tensor) -> Tensor:
    """[n, k] -> uint8 [n / 16, k / 32, 288]: 16 scales, then 4 x 16 words of eight inputs each."""
    values, scale = quantise_int4(weight)  # [n, groups, 32], [n, groups]
    nibbles = values.view(torch.uint8) & 15
    words = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(-1, 16, scale.shape[1], 4, 4)
    words = words.permute(0, 2, 3, 1, 4).flatten(2)  # [n / 16, groups, 4 words x 16 columns x 4 bytes]
    scales = scale.to(torch.bfloat16).view(-1, 16, scale.shape[1])[:, _INTERLEAVED].transpose(1, 2)
    return torch.cat((scales.contiguous().view(torch.uint8), words), 2)


def lossless_storage(weight: Tensor) -> WeightStorage:
    same = torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)
    return "bfloat16" if same else "float32"


def _pad_halves(joined: Tensor) -> Tensor:
    """Gate and up, [2 n, ...], each padded to a multiple of 16 outputs."""
    halves = joined.unflatten(0, (2, -1))
    missing = padded(halves.shape[1]) - halves.shape[1]
    tail = (0, 0) * (halves.ndim - 2)
    return torch.nn.functional.pad(halves, (*tail, 0, missing)).flatten(0, 1)


def aligned(count: int, dtype: Any, zero: bool = True) -> np.ndarray:
    """A flat array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = (np.zeros if zero else np.empty)(count * size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count * size].view(dtype)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])  # faster than .ctypes.data
