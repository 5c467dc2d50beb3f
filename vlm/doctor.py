"""Micro-benchmarks of this machine: bandwidth, matrix rate and overhead, as the engine and encoder see them.

Each runs a random network of a few layers through the same runner that serves. Wide networks show rates,
thin ones what a step and a layer cost besides. No model of interest is touched: predictions for one are
made from these figures alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from encoder.geometry import TowerShape
from llm.cost import DecoderShape, Machine, Precision, decode_work, prefill_work
from llm.request import Prompt, Request, SamplingParams
from vlm.synthetic import Sizes, write_checkpoint

Dtype = Literal["float32", "bfloat16", "float16"]

THIN = Sizes(num_layers=2, vision_layers=2)
DEEP = replace(THIN, num_layers=12, vision_layers=12)
CACHED = Sizes(d_model=512, d_ff=1408, num_heads=8, num_kv_heads=2, head_dim=64)  # 12 MB in 16 bits
WIDE = Sizes(d_model=1024, d_ff=2816, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=64)  # 90 MB
NARROW = replace(DEEP, d_model=128, d_ff=384, num_layers=8, num_heads=4, num_kv_heads=2)
TOWER = replace(THIN, vision_width=768, vision_ff=3072, vision_heads=12, image_size=256, longest_edge=256)
SMALL_TOWER = replace(
    THIN, vision_width=128, vision_ff=512, vision_heads=4, vision_layers=4, image_size=128, longest_edge=128
)

PROMPT = 128  # tokens of a prefill probe
DECODES = 24  # tokens of a decode probe
BATCH = 8  # sequences of a batched decode probe


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds of one network: prefill of `PROMPT` tokens and decode steps after it."""

    shape: DecoderShape
    prefill_s: float
    decode_s: float
    batch_s: float  # a decode step of `BATCH` sequences


def clock(device: str = "cpu") -> Callable[[], float]:
    """CPU time where one thread computes, since machines are shared; else wall time."""
    import torch

    single = device == "cpu" and torch.get_num_threads() == 1
    return time.process_time if single else time.perf_counter


def probe_decoder(directory: Path, rounds: int, device: str = "cpu", dtype: Dtype = "float32") -> Probe:
    """Runs text requests through a runner on a checkpoint; medians over `rounds`."""
    from vlm.build import build_runner
    from vlm.config import EngineOptions
    from vlm.spec import ModelSpec

    options = EngineOptions(
        model=str(directory),
        kv_cache_mb=32,
        prefix_cache=False,
        device=device,
        dtype=dtype,
        max_running=BATCH,
    )
    runner, now = build_runner(options), clock(device)

    def steps(name: str, batch: int) -> list[float]:
        for i in range(batch):
            ids = tuple((7 * j + len(name) + i) % 600 for j in range(PROMPT))
            params = SamplingParams(max_tokens=DECODES, ignore_eos=True)
            runner.submit(Request(f"{name}.{i}", Prompt(ids), params))
        seconds = []
        while runner.has_work:
            started = now()
            runner.step()
            seconds.append(now() - started)
        return seconds

    prefill, decode, batched = [], [], []
    for number in range(rounds + 1):
        disturb_caches()
        alone, together = steps(f"a{number}", 1), steps(f"b{number}", BATCH)
        if number:  # the first round warms up
            prefill.append(alone[0])
            decode.extend(alone[2:-1])
            batched.extend(together[-DECODES // 2 : -1])
    median = statistics.median
    return Probe(ModelSpec.load(directory).shape, median(prefill), median(decode), median(batched))


def disturb_caches(num_bytes: int = 48 << 20) -> None:
    """Between requests other work passes through the caches: what follows starts as cold as it would."""
    np.ones(num_bytes, np.uint8).sum()


def probe_tower(directory: Path, rounds: int, device: str = "cpu") -> tuple[float, TowerShape]:
    """Seconds a tile of a checkpoint's encoder."""
    import torch

    from encoder.load import load_encoder

    encoder, now = load_encoder(directory, device=device), clock(device)
    tile = np.full((1, encoder.tile_size, encoder.tile_size, 3), 127, np.uint8)
    seconds = []
    for number in range(rounds + 1):
        disturb_caches()
        started = now()
        encoder.encode([tile])
        if device != "cpu":
            torch.cuda.synchronize()
        if number:
            seconds.append(now() - started)
    return statistics.median(seconds), encoder.config.shape


def rate_and_element(probes: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(FLOP/s, seconds an element) that explain (seconds, FLOPs, elements) best, in relative error.

    Neither is negative: where elements explain nothing, the rate alone is fitted.
    """
    rows = np.array([[flops, elements] for _, flops, elements in probes])
    seconds = np.array([max(one, 1e-9) for one, _, _ in probes])
    scaled = rows / seconds[:, None]
    inverse, element = np.linalg.lstsq(scaled, np.ones(len(probes)), rcond=None)[0]
    if inverse <= 0 or element < 0:
        return float(1.0 / np.mean(seconds / rows[:, 0])), 0.0
    return float(1.0 / inverse), float(element)


def copy_bandwidth(num_bytes: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes/s of a copy in host memory, which is what swapping costs on a CPU."""
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        np.copyto(target, source)
        seconds.append(time.process_time() - started)
    return num_bytes / max(statistics.median(seconds), 1e-9)


def cache_bytes() -> int:
    """Half the last-level cache, the other half left to what else runs; 0 where it is not told."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    try:
        text = path.read_text().strip()
        return int(text.removesuffix("K")) * 1024 // 2
    except (OSError, ValueError):
        return 0


def preprocess_seconds(rounds: int) -> tuple[float, float]:
    """(seconds a megapixel decoded, seconds a tile cut) from two PNGs of gradients."""
    import io

    from PIL import Image

    from preprocess.limits import ImageLimits
    from preprocess.stage import preprocess
    from vlm.config import DEFAULT_MODEL
    from vlm.spec import ModelSpec

    spec = ModelSpec.load(DEFAULT_MODEL).preprocess_spec("auto")

    def seconds(side: int) -> float:
        ramp = np.linspace(0, 255, side, dtype=np.uint8)
        pixels = np.stack(
            [
                np.tile(ramp, (side, 1)),
                np.tile(ramp[:, None], (1, side)),
                np.full((side, side), 90, np.uint8),
            ],
            2,
        )
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        taken = []
        for _ in range(rounds + 1):
            started = time.process_time()
            preprocess(buffer.getvalue(), spec, ImageLimits())
            taken.append(time.process_time() - started)
        return statistics.median(taken[1:])

    small, large = seconds(64), seconds(1024)
    return max(0.0, large - small) / (1024**2 / 1e6), small


def storage_of(directory: Path, device: str = "cpu", dtype: Dtype = "float32") -> Precision:
    """How a 16-bit checkpoint's weights and its cache are stored by the backend that will run it."""
    from llm.backend.native_build import why_unavailable

    wide = {"float32": 4.0}.get(dtype, 2.0)
    native = device == "cpu" and why_unavailable() is None
    return Precision(
        weight_bytes=2.0 if native else wide, kv_bytes=wide, compute_bits=32 if wide == 4 else 16
    )


def measure_machine(quick: bool = True, device: str = "cpu", dtype: Dtype = "float32") -> Machine:
    """Measures this machine on one thread; `quick` takes a few seconds, else several times as many rounds."""
    import torch

    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        return _measure(3 if quick else 12, device, dtype)
    finally:
        torch.set_num_threads(threads)


def _measure(rounds: int, device: str, dtype: Dtype) -> Machine:
    def decoder(name: str, sizes: Sizes) -> Probe:
        return probe_decoder(write_checkpoint(root / name, sizes), rounds, device, dtype)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        thin, deep = decoder("thin", THIN), decoder("deep", DEEP)
        cached, wide = decoder("cached", CACHED), decoder("wide", WIDE)
        narrow = decoder("narrow", NARROW)
        precision = storage_of(root / "wide", device, dtype)
        towers = [probe_tower(root / name, rounds, device) for name in ("thin", "deep")]
        towers += [
            probe_tower(write_checkpoint(root / name, sizes), rounds, device)
            for name, sizes in (("tower", TOWER), ("small_tower", SMALL_TOWER))
        ]
    layer_s = max(0.0, deep.decode_s - thin.decode_s) / (DEEP.num_layers - THIN.num_layers)
    step_s = max(0.0, thin.decode_s - THIN.num_layers * layer_s)
    tower_layer_s = max(0.0, towers[1][0] - towers[0][0]) / (DEEP.vision_layers - THIN.vision_layers)

    def overhead(probe: Probe) -> float:
        return step_s + probe.shape.num_layers * layer_s

    def bandwidth(probe: Probe) -> float:
        moved = decode_work(probe.shape, 1, PROMPT + DECODES // 2, precision).num_bytes
        return moved / max(probe.decode_s - overhead(probe), 1e-9)

    def prefill(probe: Probe) -> tuple[float, float, float]:
        shape = probe.shape
        elements = PROMPT * shape.num_layers * shape.d_model
        return probe.prefill_s - overhead(probe), prefill_work(shape, PROMPT).flops, elements

    def batched(probe: Probe) -> float:
        done = decode_work(probe.shape, BATCH, PROMPT + DECODES * 3 // 4).flops
        elements = BATCH * probe.shape.num_layers * probe.shape.d_model
        return done / max(probe.batch_s - overhead(probe) - elements * element_s, 1e-9)

    rate, element_s = rate_and_element([prefill(probe) for probe in (narrow, cached, wide)])
    decode_rate = statistics.median(batched(probe) for probe in (narrow, cached, wide))
    tower_rate, tower_element_s = rate_and_element(
        [(s - t.num_layers * tower_layer_s, t.flops(1), t.elements(1)) for s, t in towers[2:]]
    )
    peak = max(rate, decode_rate, tower_rate)
    per_megapixel, per_tile = preprocess_seconds(rounds)
    return Machine(
        name=_name(device),
        peak_flops=peak,
        bandwidth=bandwidth(wide),
        memory_bytes=_memory(device),
        compute_efficiency=rate / peak,
        decode_efficiency=decode_rate / peak,
        tower_efficiency=tower_rate / peak,
        step_overhead_s=step_s,
        layer_overhead_s=layer_s,
        tower_overhead_s=tower_layer_s,
        element_s=element_s,
        tower_element_s=tower_element_s,
        cache_bytes=cache_bytes() if device == "cpu" else 0,
        cache_bandwidth=bandwidth(cached),
        host_bandwidth=copy_bandwidth(rounds=rounds),
        workspace_bytes=256_000_000,
        preprocess_s_per_tile=per_tile,
        preprocess_s_per_megapixel=per_megapixel,
        source=f"measured, {rounds} rounds, medians",
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
        "matrix_gflop_s": machine.peak_flops * machine.compute_efficiency / 1e9,
        "decode_gflop_s": machine.peak_flops * machine.decode_efficiency / 1e9,
        "tower_gflop_s": machine.peak_flops * machine.tower_efficiency / 1e9,
        "step_overhead_ms": machine.step_overhead_s * 1e3,
        "layer_overhead_ms": machine.layer_overhead_s * 1e3,
        "tower_layer_overhead_ms": machine.tower_overhead_s * 1e3,
        "element_ns": machine.element_s * 1e9,
        "tower_element_ns": machine.tower_element_s * 1e9,
        "ridge_flop_per_byte": machine.ridge(),
    }
