"""What this machine does in a second: arithmetic and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from encoder.encoder_config import Arithmetic


def start_timer(device: str = "cpu") -> Callable[[], float]:
    """Seconds from now until it is called: of CPU where one thread computes, since machines are shared.

    Wall time where several threads or a device compute, and where the processor's clock has not moved:
    on some virtual machines it ticks every 10 ms.
    """
    import torch

    single = device == "cpu" and torch.get_num_threads() == 1
    wall, cpu = time.perf_counter(), time.process_time()

    def seconds() -> float:
        spent = time.process_time() - cpu if single else 0.0
        return spent or time.perf_counter() - wall

    return seconds


_SIDE, _GPU_SIDE = 1024, 8192  # of the matrices


def gemm_rate(device: str, rounds: int, arithmetic: Arithmetic | None = None) -> float:
    """FLOP/s of the best square matrix product; float32 on a CPU and bfloat16 elsewhere, if not told."""
    import torch

    arithmetic = arithmetic or ("float32" if device == "cpu" else "bfloat16")
    dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
    side = _SIDE if device == "cpu" else _GPU_SIDE
    a, b = torch.ones(2, side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(rounds + 1):
        seconds = start_timer(device)
        (a @ b).sum().item()
        best = min(best, seconds())
    return 2.0 * side**3 / best


def copy_bandwidth(num_bytes: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes/s of a copy in host memory, which is what swapping costs on a CPU."""
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(rounds):
        spent = start_timer()
        np.copyto(target, source)
        seconds.append(spent())
    return num_bytes / statistics.median(seconds)


def cache_bytes() -> int:
    """The last-level cache, half of it left to what else runs; 0 where it is not told."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    try:
        return int(path.read_text().strip().removesuffix("K")) * 1024 // 2
    except (OSError, ValueError):
        return 0
