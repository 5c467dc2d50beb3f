"""What a GPU does to a program, done on the CPU: captured kernels are replayed, copies come late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm.backend.cuda.graphs import Captured
from llm.backend.cuda.step_batch import Copies, Pending

aten = torch.ops.aten
WAITING = frozenset(
    (
        aten.item.default,
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
    )
)


class HostSync(Exception):
    """A number was read inside a capture: on a GPU the host would wait, and the graph keep an old value."""


class _Record(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITING:
            raise HostSync(str(func))
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result


class CpuRecorder:
    """`llm.backend.cuda.graphs.Recorder`: operators with the tensors they were captured with. What a graph
    would keep from its capture (a host's number, a shape, a tensor made outside) is kept here too."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []

    def capture(self, function: Callable[[], Captured]) -> Captured:
        with torch.inference_mode(), _Record(self._calls):
            return function()

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            for kept, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


class _Late(Pending):
    def __init__(self, copies: LateCopies, host: np.ndarray, target: Tensor) -> None:
        self._copies, self._host, self._target = copies, host, target

    def synchronize(self) -> None:
        if self in self._copies.under_way:
            self._copies.under_way.remove(self)
            self._target.copy_(torch.from_numpy(self._host))


class LateCopies(Copies):
    """Reads the host's buffer as late as a device may: when it is waited for, or when `arrive` is called."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.under_way: list[_Late] = []

    def start(self, host: np.ndarray, target: Tensor) -> Pending:
        self.under_way.append(_Late(self, host, target))
        return self.under_way[-1]

    def arrive(self) -> None:
        for late in list(self.under_way):
            late.synchronize()
