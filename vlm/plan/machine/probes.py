"""Small random networks whose step times tell a machine's rates and overheads apart.

They run through the same runner that serves: wide ones show rates, thin and deep ones what a step and a
layer cost besides.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from encoder.geometry import TowerShape
from llm.cost import Chunk, DecoderShape, Precision, decode_work, step_work
from llm.request import ImageSpan, Prompt, Request, SamplingParams, VisualKey
from preprocess.types import TileGrid, Tiles
from vlm.checkpoint import Checkpoint
from vlm.plan.machine.rates import start_timer
from vlm.plan.machine.synthetic import Sizes
from vlm.spec import ModelSpec

Dtype = Literal["float32", "bfloat16", "float16"]

THIN = Sizes(num_layers=2, vision_layers=2)
DECODERS = (
    THIN,
    replace(THIN, num_layers=12),
    replace(THIN, d_model=128, d_ff=384, num_layers=4, num_heads=4, num_kv_heads=2),
    replace(THIN, d_model=256, d_ff=768, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64),
    replace(THIN, d_model=512, d_ff=1408, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64),
    replace(THIN, d_model=768, d_ff=2048, num_layers=8, num_heads=12, num_kv_heads=4, head_dim=64),
    replace(THIN, d_model=1024, d_ff=2816, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=64),
)
TOWERS = (
    THIN,
    replace(THIN, vision_layers=12),
    replace(THIN, vision_width=128, vision_ff=512, vision_heads=4, vision_layers=4, image_size=128),
    replace(THIN, vision_width=384, vision_ff=1536, vision_heads=6, vision_layers=3, image_size=256),
    replace(THIN, vision_width=768, vision_ff=3072, vision_heads=12, image_size=384),
)
PROMPTS = (32, 128)  # tokens of the prefill probes
DECODES = 12  # tokens of an answer
SMALL_TOWER = 1e10  # FLOPs a tile
BATCH = 4  # sequences of the batched decode probe


def disturb_caches() -> None:
    """Between requests other work passes through the caches: what follows starts as cold as it would."""
    np.ones(48 << 20, np.uint8).sum()


@dataclass
class DecoderProbe:
    """A runner on one random network, and the seconds of its steps by kind."""

    runner: Any
    shape: DecoderShape
    device: str
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    _asked: int = 0

    def round(self) -> None:
        for length in PROMPTS:
            disturb_caches()
            steps = self._answer(length, 1)
            self.seconds["prefill", length].append(steps[0])
            self.seconds["decode", length].extend(steps[2:-1])
        self.seconds["batch", PROMPTS[0]].extend(self._answer(PROMPTS[0], BATCH)[-DECODES // 2 : -1])

    def median(self, kind: str, length: int) -> float:
        return statistics.median(self.seconds[kind, length])

    def _answer(self, length: int, batch: int) -> list[float]:
        for _ in range(batch):
            self._asked += 1
            ids = tuple((7 * i + self._asked) % 600 for i in range(length))
            params = SamplingParams(max_tokens=DECODES, ignore_eos=True)
            self.runner.submit(Request(str(self._asked), Prompt(ids), params))
        steps = []
        while self.runner.has_work:
            spent = start_timer(self.device)
            self.runner.step()
            steps.append(spent())
        return steps


def decoder_probe(directory: Path, device: str = "cpu", dtype: Dtype = "float32") -> DecoderProbe:
    from vlm.build import build_runner
    from vlm.config import EngineOptions

    options = EngineOptions(
        model=str(directory), kv_cache_mb=16, prefix_cache=False, device=device, dtype=dtype
    )
    return DecoderProbe(build_runner(options), ModelSpec.load(directory).shape, device)


@dataclass
class TowerProbe:
    """A runner whose tower is the network of interest, and the seconds from an image's tiles to its token.

    Preprocessing is not in them; asking for the tiles, handing them over and a thin decoder's prefill are.
    """

    runner: Any
    spec: ModelSpec
    shape: TowerShape
    device: str
    grids: tuple[TileGrid, ...]
    seconds: dict[TileGrid, list[float]] = field(default_factory=lambda: defaultdict(list))
    _asked: int = 0

    def round(self) -> None:
        for grid in self.grids:
            self.seconds[grid].append(self._ask(grid))

    def prompt_tokens(self, grid: TileGrid) -> int:
        return self.spec.geometry.rows(grid) + 4

    def _ask(self, grid: TileGrid) -> float:
        self._asked += 1
        side = self.spec.geometry.image_size
        tiles = np.full((grid.num_tiles, side, side, 3), 127, np.uint8)
        key = VisualKey(f"{self._asked:064x}")
        length = self.prompt_tokens(grid)
        prompt = Prompt((1,) * length, (ImageSpan(2, length - 4, key, 0),))
        made = Tiles(tiles, grid)
        disturb_caches()
        spent = start_timer(self.device)
        self.runner.submit(Request(str(self._asked), prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        self.runner.step()
        self.runner.put_tiles(key, made)
        while self.runner.has_work:
            self.runner.step()
        return spent()


def tower_probe(directory: Path, device: str = "cpu") -> TowerProbe:
    from vlm.arithmetic import settled
    from vlm.build import build_runner
    from vlm.config import EngineOptions

    options = EngineOptions(model=str(directory), kv_cache_mb=16, prefix_cache=False, device=device)
    options = settled(options)  # the arithmetic that a server here takes
    shape = Checkpoint.read(directory).encoder.shape
    spec = ModelSpec.load(directory)
    side = spec.geometry.image_size
    grids = [TileGrid(0, 0, True, side, side)]
    if shape.flops(grids[0]) < SMALL_TOWER:  # what a call costs shows where a tile costs little
        grids.append(TileGrid(2, 2, True, side, side))
    return TowerProbe(build_runner(options), spec, shape, device, tuple(grids))


def non_negative_fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, that explain `seconds` best in relative error.

    Columns whose coefficient would be negative are dropped, the most negative first.
    """
    table = np.array(rows, float) / np.array(seconds, float)[:, None]
    kept = list(range(table.shape[1]))
    found = np.zeros(table.shape[1])
    while kept:
        scale = np.abs(table[:, kept]).max(axis=0)
        scale[scale == 0] = 1.0
        solved = np.linalg.lstsq(table[:, kept] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept.pop(int(np.argmin(solved * scale)))
    return [float(value) for value in found]


@dataclass(frozen=True, slots=True)
class DecoderFit:
    step_s: float
    layer_s: float
    bandwidth: float
    cache_bandwidth: float
    decode_rate: float
    rate: float
    overlap: float
    cold_s: float
    element_s: float


def fit_decoder(
    probes: Sequence[DecoderProbe], precision: Precision, cache: float, peak: float
) -> DecoderFit:
    """Decodes alone and together give overheads, bandwidth and what arithmetic adds; prefills give the rate.

    Where a FLOP adds less to a streaming decode than to one whose weights stay in cache, it hides behind the
    traffic.
    `peak`, in FLOP/s, bounds the rates, and stands in for one that leaves no trace.
    """
    step_s, layer_s, cached, streamed, inside, exposed = _fit_decodes(probes, precision, cache)
    bandwidth = 1.0 / streamed if streamed else 1.0 / max(cached, 1e-15)
    cache_bandwidth = 1.0 / cached if cached else 4 * bandwidth

    decode_rate = min(peak, 1.0 / inside) if inside else peak
    overlap = min(1.0, max(0.0, 1.0 - exposed * decode_rate))

    def known(shape: DecoderShape, num_bytes: float) -> float:
        if num_bytes <= cache:
            stream = num_bytes / cache_bandwidth
        else:
            stream = (1.0 - overlap) * num_bytes / bandwidth
        return step_s + shape.num_layers * layer_s + stream

    cold_s, flop_s, element_s = _fit_prefills(probes, precision, known)
    rate = min(peak, 1.0 / flop_s) if flop_s else peak
    return DecoderFit(
        step_s, layer_s, bandwidth, cache_bandwidth, decode_rate, rate, overlap, cold_s, element_s
    )


def _fit_decodes(probes: Sequence[DecoderProbe], precision: Precision, cache: float) -> list[float]:
    """Seconds of a step, a layer, a cached byte, a streamed byte, and a FLOP beside each of these."""
    rows, seconds = [], []
    for probe in probes:
        kinds = [("decode", 1, length) for length in PROMPTS] + [("batch", BATCH, PROMPTS[0])]
        for kind, batch, length in kinds:
            work = decode_work(probe.shape, batch, length + DECODES // 2, precision)
            moved = work.num_bytes
            inside = moved <= cache
            traffic = [moved, 0.0] if inside else [0.0, moved]
            arithmetic = [work.flops, 0.0] if inside else [0.0, work.flops]
            rows.append([1.0, probe.shape.num_layers, *traffic, *arithmetic])
            seconds.append(probe.median(kind, length))
    return non_negative_fit(rows, seconds)


def _fit_prefills(
    probes: Sequence[DecoderProbe], precision: Precision, known: Callable[[DecoderShape, float], float]
) -> list[float]:
    """Seconds of a cold start, a FLOP and an element, on top of what is known of a step."""
    rows, seconds = [], []
    for probe in probes:
        for length in PROMPTS:
            work = step_work(probe.shape, [Chunk(length)], precision)
            rows.append([1.0, work.flops, length * probe.shape.num_layers * probe.shape.d_model])
            total = probe.median("prefill", length)
            seconds.append(max(total - known(probe.shape, work.num_bytes), 0.05 * total))
    return non_negative_fit(rows, seconds)


def fit_tower(
    probes: Sequence[TowerProbe], peak: float, prefill_s: Callable[[int], float]
) -> tuple[float, float, float, float]:
    """(seconds a call, seconds a layer, FLOP/s, seconds an element).

    `prefill_s`: what the thin decoder takes for a prompt of so many tokens.
    """
    rows, seconds = [], []
    for probe in probes:
        for grid, taken in probe.seconds.items():
            rows.append([1, probe.shape.num_layers, probe.shape.flops(grid), probe.shape.elements(grid)])
            total = statistics.median(taken)
            seconds.append(max(total - prefill_s(probe.prompt_tokens(grid)), 0.05 * total))
    call_s, layer_s, flop_s, element_s = non_negative_fit(rows, seconds)
    return call_s, layer_s, min(peak, 1.0 / flop_s) if flop_s else peak, element_s
