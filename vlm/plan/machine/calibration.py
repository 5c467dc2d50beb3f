"""Micro-benchmarks of this machine: bandwidth, matrix rate and overhead, as the engine and encoder see them.

No model of interest is touched: predictions for one are made from these figures alone.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from llm.cost import Machine, Precision
from vlm.arithmetic import fast_arithmetic
from vlm.plan.machine.probes import (
    DECODERS,
    PROMPTS,
    TOWERS,
    Dtype,
    decoder_probe,
    fit_decoder,
    fit_tower,
    tower_probe,
)
from vlm.plan.machine.rates import cache_bytes, copy_bandwidth, gemm_rate, start_timer
from vlm.plan.machine.synthetic import write_checkpoint

QUICK_ROUNDS, ROUNDS = 4, 8
LEAST_MEASURED_S = 0.01  # some clocks of processor time stand still for milliseconds


def measure_machine(quick: bool = True, device: str = "cpu", dtype: Dtype = "float32") -> Machine:
    """Measures this machine, a CPU on one thread. `quick` takes some ten seconds, else twice that."""
    import torch

    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        return _measure(QUICK_ROUNDS if quick else ROUNDS, device, dtype)
    finally:
        torch.set_num_threads(threads)


def _measure(rounds: int, device: str, dtype: Dtype) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        decoders = [
            decoder_probe(write_checkpoint(root / f"decoder{i}", sizes), device, dtype)
            for i, sizes in enumerate(DECODERS)
        ]
        towers = [
            tower_probe(write_checkpoint(root / f"tower{i}", sizes), device) for i, sizes in enumerate(TOWERS)
        ]
        precision = precision_here(device, dtype)
    for number in range(rounds + 1):
        for decoder in decoders:
            decoder.round()
        for tower in towers:
            tower.round()
        if not number:  # the first round warms up
            for decoder in decoders:
                decoder.seconds.clear()
            for tower in towers:
                tower.seconds.clear()
    cache = cache_bytes() if device == "cpu" else 0
    peak = 1.5 * gemm_rate(device, rounds)  # our own kernels may beat the library's
    fit = fit_decoder(decoders, precision, cache, peak)

    def thin_prefill(length: int) -> float:
        short, long = (decoders[0].median("prefill", n) for n in PROMPTS)
        return short + (long - short) * (length - PROMPTS[0]) / (PROMPTS[1] - PROMPTS[0])

    tower_peak = 1.5 * gemm_rate(device, rounds, fast_arithmetic()) if device == "cpu" else peak
    call_s, layer_s, tower_rate, tower_element_s = fit_tower(towers, tower_peak, thin_prefill)
    per_megapixel, per_tile = preprocess_seconds(rounds)
    peak = max(fit.rate, fit.decode_rate, tower_rate)
    return Machine(
        name=_name(device),
        peak_flops=peak,
        bandwidth=fit.bandwidth,
        memory_bytes=_memory(device),
        compute_efficiency=fit.rate / peak,
        decode_efficiency=fit.decode_rate / peak,
        tower_efficiency=tower_rate / peak,
        overlap=fit.overlap,
        step_overhead_s=fit.step_s,
        layer_overhead_s=fit.layer_s,
        cold_step_s=fit.cold_s,
        tower_call_s=call_s,
        tower_overhead_s=layer_s,
        element_s=fit.element_s,
        tower_element_s=tower_element_s,
        cache_bytes=cache,
        cache_bandwidth=fit.cache_bandwidth,
        host_bandwidth=copy_bandwidth(rounds=rounds),
        workspace_bytes=256_000_000,
        preprocess_s_per_tile=per_tile,
        preprocess_s_per_megapixel=per_megapixel,
        source=f"measured, {rounds} rounds, medians",
    )


def preprocess_seconds(rounds: int) -> tuple[float, float]:
    """(seconds a megapixel decoded, seconds a tile cut), from a small and a large PNG."""
    from PIL import Image

    from preprocess.limits import ImageLimits
    from preprocess.stage import preprocess
    from vlm.config import DEFAULT_MODEL
    from vlm.spec import ModelSpec

    spec = ModelSpec.load(DEFAULT_MODEL).preprocess_spec("auto")

    def seconds(side: int) -> float:
        ramp = np.linspace(0, 255, side, dtype=np.uint8)
        flat = np.full((side, side), 90, np.uint8)
        pixels = np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side)), flat], 2)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        preprocess(buffer.getvalue(), spec, ImageLimits())
        spent, count = start_timer(), 0
        while count < rounds or spent() < LEAST_MEASURED_S:
            preprocess(buffer.getvalue(), spec, ImageLimits())
            count += 1
        return spent() / count

    small, large = seconds(64), seconds(1024)  # of as many tiles
    return max(0.0, large - small) / (1024**2 / 1e6), small / spec.rule.grid(64, 64).num_tiles


def precision_here(device: str = "cpu", dtype: Dtype = "float32") -> Precision:
    """How a 16-bit checkpoint's weights and its cache are stored by the backend that will run it."""
    from llm.backend.native_build import why_unavailable

    wide = 4.0 if dtype == "float32" else 2.0
    native = device == "cpu" and why_unavailable() is None
    return Precision(
        weight_bytes=2.0 if native else wide, kv_bytes=wide, compute_bits=32 if wide == 4 else 16
    )


def _name(device: str) -> str:
    if device != "cpu":
        import torch

        return str(torch.cuda.get_device_name(device))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, one thread"
    except OSError:
        pass
    return "this CPU, one thread"


def _memory(device: str) -> int:
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def describe(machine: Machine) -> dict[str, Any]:
    """The figures a person wants, in their units."""
    return {
        "bandwidth_gb_s": machine.bandwidth / 1e9,
        "cache_bandwidth_gb_s": machine.cache_bandwidth / 1e9,
        "best_gflop_s": machine.peak_flops / 1e9,
        "prefill_gflop_s": machine.rate() / 1e9,
        "decode_gflop_s": machine.rate(decoding=True) / 1e9,
        "tower_gflop_s": machine.peak_flops * machine.tower_efficiency / 1e9,
        "step_overhead_ms": machine.step_overhead_s * 1e3,
        "layer_overhead_ms": machine.layer_overhead_s * 1e3,
        "cold_step_ms": machine.cold_step_s * 1e3,
        "tower_call_ms": machine.tower_call_s * 1e3,
        "tower_layer_overhead_ms": machine.tower_overhead_s * 1e3,
        "element_ns": machine.element_s * 1e9,
        "tower_element_ns": machine.tower_element_s * 1e9,
        "overlap": machine.overlap,
        "ridge_flop_per_byte": machine.ridge(),
    }
