"""The latest values under their keys, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch


class Recent:
    """Drops what was used longest ago. A value larger than the whole is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable) -> Any | None:
        if key not in self._values:
            self.misses += 1
            return None
        self.hits += 1
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        if num_bytes > self._max_bytes or key in self._values:
            return
        self._values[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._values.clear()
        self.num_bytes = 0


def tensor_bytes(value: Any) -> int:
    """Of all tensors that a value holds, through containers and the attributes of cache classes."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    layers = getattr(value, "layers", None)
    if isinstance(layers, list):
        return sum(tensor_bytes(vars(layer)) for layer in layers)
    return 0
