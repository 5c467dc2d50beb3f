"""The torch backend's KV pool: plain elements, or int8 with a float32 scale a position and KV head.

Int8 is rounded on write and multiplied out on read: the plain form of what native.cpp does in its registers.
Letters in shapes: T tokens, K KV heads, D head_dim, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm.decoder_config import DecoderConfig

_BLOCK_AXIS = 3  # of a pool's tensors


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's view of the pool."""

    data: Tensor  # [2, K, blocks, block_size, D]; index 0 holds keys
    scales: Tensor | None  # float32 [2, K, blocks, block_size]
    dtype: torch.dtype  # of what is read

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, K, D] go to these positions of the pool, int64 [T]."""
        flat = self.data.flatten(2, 3)
        for i, rows in enumerate((k.transpose(0, 1), v.transpose(0, 1))):
            if self.scales is None:
                flat[i].index_copy_(1, slots, rows)
                continue
            values, scales = quantise_heads(rows)
            flat[i].index_copy_(1, slots, values)
            self.scales.flatten(2)[i].index_copy_(1, slots, scales)

    def slice(self, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [K, length, D] of consecutive positions; a view where elements are plain."""
        pair = self.data.flatten(2, 3)[:, :, first : first + length]
        if self.scales is not None:
            pair = (pair * self.scales.flatten(2)[:, :, first : first + length, None]).to(self.dtype)
        return pair[0], pair[1]

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [K, positions, D] of these blocks, int64 [n]."""
        pair = self.data.flatten(-2).index_select(2, blocks).unflatten(-1, self.data.shape[3:]).flatten(2, 3)
        if self.scales is not None:
            pair = (pair * self.scales.index_select(2, blocks).flatten(2)[..., None]).to(self.dtype)
        return pair[0], pair[1]


@dataclass(frozen=True, slots=True)
class TensorSwap:
    """KV of swapped-out blocks on the host, scales included."""

    data: Tensor  # [layers, 2, K, n, block_size, D]
    scales: Tensor | None  # [layers, 2, K, n, block_size]


class KvPool:
    """Zeroed KV of `num_blocks` blocks on one device, in `dtype` or int8; read as `dtype`."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        int8: bool = False,
    ) -> None:
        shape = (config.num_layers, 2, config.num_kv_heads, num_blocks, block_size, config.head_dim)
        self.block_size = block_size
        self._dtype = dtype
        self.data = torch.zeros(shape, device=device, dtype=torch.int8 if int8 else dtype)
        self.scales = torch.zeros(shape[:-1], device=device) if int8 else None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def layer(self, index: int) -> LayerKv:
        return LayerKv(self.data[index], None if self.scales is None else self.scales[index], self._dtype)

    def copy_block(self, source: int, target: int) -> None:
        for part in self._parts():
            part[:, :, :, target] = part[:, :, :, source]

    def swap_out(self, blocks: tuple[int, ...]) -> TensorSwap:
        """Copies on the host, in their order."""
        copies = [part[:, :, :, list(blocks)].to("cpu", copy=True) for part in self._parts()]
        return TensorSwap(copies[0], copies[1] if len(copies) > 1 else None)

    def swap_in(self, handle: TensorSwap, blocks: tuple[int, ...]) -> None:
        """Raises ValueError when the handle holds another number of blocks."""
        if handle.data.shape[3] != len(blocks):
            raise ValueError("a swapped-out handle must go back into as many blocks as it came from")
        for part, kept in zip(self._parts(), (handle.data, handle.scales), strict=False):
            assert kept is not None
            part[:, :, :, list(blocks)] = kept.to(part.device)

    @property
    def layout(self) -> str:
        shape = [size for axis, size in enumerate(self.data.shape) if axis != _BLOCK_AXIS]
        return f"torch {self.data.dtype} {shape}"

    def save(self, blocks: tuple[int, ...]) -> list[bytes]:
        """The bytes of each block: elements, then scales."""
        parts = [part[:, :, :, list(blocks)].to("cpu", copy=True) for part in self._parts()]
        return [
            b"".join(_bytes(part.select(_BLOCK_AXIS, index).contiguous()) for part in parts)
            for index in range(len(blocks))
        ]

    def load(self, saved: list[bytes], blocks: tuple[int, ...]) -> None:
        """What `save` gave. Raises ValueError for bytes of another length."""
        targets = [[part.select(_BLOCK_AXIS, block) for part in self._parts()] for block in blocks]
        size = sum(target.nbytes for target in targets[0]) if targets else 0
        if any(len(data) != size for data in saved) or len(saved) != len(blocks):
            raise ValueError("saved blocks are of another size")
        for data, parts in zip(saved, targets, strict=True):
            values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for target, part in zip(parts, values.split([target.nbytes for target in parts]), strict=True):
                target.copy_(part.view(target.dtype).view(target.shape))

    def _parts(self) -> list[Tensor]:
        return [self.data] if self.scales is None else [self.data, self.scales]


def _bytes(part: Tensor) -> bytes:
    return bytes(part.view(-1).view(torch.uint8).numpy())


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> int8 [..., D] and float32 scales [...]: the largest of a head becomes 127.

    A head with anything but finite numbers gets a scale of nan, so that it is not read as numbers.
    """
    x = x.to(torch.float32)
    largest = x.abs().amax(-1)
    inverse = torch.where((largest > 0) & largest.isfinite(), 127 / largest, 0)
    values = (x * inverse[..., None]).nan_to_num(0, 0, 0).round().to(torch.int8)
    return values, torch.where(largest.isfinite(), largest / 127, torch.nan)
