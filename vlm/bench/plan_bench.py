"""Prediction against measurement: TTFT, TPOT and KV bytes, calibrated by `vlm doctor`'s figures alone."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llm.cost import Machine, Precision, decode_time, kv_bytes
from llm.request import Delta, Finished, Request, SamplingParams, WantVisual
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import preprocess
from vlm.arithmetic import settled
from vlm.bench.harness.engine_load import ImageRequest, document, image_request
from vlm.bench.harness.results import report, result, say, spread
from vlm.build import build_runner
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.plan.catalog import PlannedModel, load_model
from vlm.plan.labs.image_lab import costs_of_images, plan_image
from vlm.plan.machine.calibration import describe, measure_machine, precision_here
from vlm.plan.machine.rates import start_timer
from vlm.plan.machine.synthetic import SMOLVLM_256M, write_checkpoint
from vlm.spec import ModelSpec
from workers.local.engine_runner import EngineRunner

QUESTION = "What is in the image?"
OUTPUT = 24  # tokens of an answer
BATCHES = (1, 4)


class _Run:
    """Steps a runner with one question to the end, in CPU time."""

    def __init__(self, spec: ModelSpec, runner: EngineRunner) -> None:
        self.spec, self.runner = spec, runner
        self.peak_blocks = 0

    def answer(self, asked: list[ImageRequest]) -> tuple[float, list[float]]:
        """(seconds to the first token, seconds of each decode step with all sequences running)."""
        images = {key: data for one in asked for key, data in one.images.items()}
        since_start = start_timer()
        for one in asked:
            self.runner.submit(one.request)
        first, steps = 0.0, []
        ended = 0
        while ended < len(asked):
            in_step = start_timer()
            events = self.runner.step()
            spent = in_step()
            tokens = [event for event in events if isinstance(event, Delta)]
            if tokens and not first:
                first = since_start()
            elif len(tokens) == len(asked):
                steps.append(spent)
            self.peak_blocks = max(self.peak_blocks, self.runner.engine.stats().kv_blocks_held)
            ended += sum(isinstance(event, Finished) for event in events)
            for event in events:
                if isinstance(event, WantVisual):
                    tiles = preprocess(images[event.key], self.spec.preprocess_spec("auto"), ImageLimits())
                    self.runner.put_tiles(event.key, tiles)
        return first, steps


def _requests(spec: ModelSpec, count: int, seed: int, name: str = "") -> list[ImageRequest]:
    """Questions about images of their own, so that no cache helps."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    return [
        image_request(spec, f"{name}{seed}-{i}", [document(1000 * seed + i)], QUESTION, params)
        for i in range(count)
    ]


def predict_ttft(
    model: PlannedModel, machine: Machine, precision: Precision, request: Request, image: bytes
) -> float:
    """Seconds of preprocessing, tower and prefill for one image and its question."""
    assert model.tower is not None and model.tiling is not None
    info = probe(image, ImageLimits())
    size = (info.width, info.height)
    costs = costs_of_images([size], model.tiling, model.tower, model.decoder)
    text = request.prompt.num_tokens - request.prompt.num_image_tokens
    grids = [model.tiling.grid(*size)]
    plan = plan_image(model.decoder, model.tower, machine, grids, text, precision, per_image=costs)
    return plan.ttft_s


@dataclass(frozen=True)
class Measured:
    """What one checkpoint took and held, by batch."""

    asked: dict[int, list[ImageRequest]]  # the last round's
    first_s: dict[int, list[float]]
    step_s: dict[int, list[float]]
    kv_bytes: dict[int, int]
    block_size: int


def measure(directory: Path, rounds: int) -> Measured:
    """Questions about new images, alone and together, on a runner without caches that help."""
    spec = ModelSpec.load(directory)
    options = EngineOptions(model=str(directory), kv_cache_mb=256, prefix_cache=False)
    runner = build_runner(settled(options))
    run = _Run(spec, runner)
    found = Measured({}, {}, {}, {}, int(runner.info()["block_size"]))
    run.answer(_requests(spec, 1, 0))  # warms up
    for batch in BATCHES:
        found.first_s[batch], found.step_s[batch] = [], []
        for number in range(rounds):
            if batch > 1:  # with their images encoded, all start together and are long together
                run.answer(_requests(spec, batch, 100 * batch + number, "encode-"))
            run.peak_blocks = 0
            found.asked[batch] = _requests(spec, batch, 100 * batch + number)
            first, steps = run.answer(found.asked[batch])
            found.first_s[batch].append(first)
            found.step_s[batch].extend(steps)
        found.kv_bytes[batch] = run.peak_blocks * _block_bytes(runner)
    return found


def compare(
    name: str, directory: Path, machines: tuple[Machine, Machine], found: Measured
) -> dict[str, dict[str, Any]]:
    """Every measurement beside the mean of the predictions from the calibrations before and after it."""
    model, precision = load_model(str(directory)), precision_here()
    entries: dict[str, dict[str, Any]] = {}

    def enter(what: str, predicted: float, values: Sequence[float], unit: str, **more: Any) -> None:
        measured = statistics.median(values)
        entries[f"{name}_{what}"] = result(
            abs(predicted - measured) / measured,
            "relative error",
            predicted=predicted,
            measured=measured,
            measured_unit=unit,
            spread=spread(values),
            model=name,
            dtype=f"weights {precision.weight_bytes:g} B, KV {precision.kv_bytes:g} B",
            threads=1,
            **more,
        )

    for batch, asked in found.asked.items():
        lengths = [one.request.prompt.num_tokens + OUTPUT - 1 for one in asked]  # the last one isn't cached
        middle = lengths[0] - OUTPUT // 2
        if batch == 1:
            image = next(iter(asked[0].images.values()))
            ttft = [predict_ttft(model, m, precision, asked[0].request, image) * 1e3 for m in machines]
            measured = [1e3 * value for value in found.first_s[1]]
            context = asked[0].request.prompt.num_tokens
            enter("ttft_ms", statistics.mean(ttft), measured, "ms", batch=1, context=context)
        tpot = [decode_time(model.decoder, m, batch, middle, precision).seconds * 1e3 for m in machines]
        measured = [1e3 * value for value in found.step_s[batch]]
        enter(f"tpot_b{batch}_ms", statistics.mean(tpot), measured, "ms", batch=batch, context=middle)
        held = sum(kv_bytes(model.decoder, n, precision.kv_bytes, found.block_size) for n in lengths)
        enter(f"kv_b{batch}_bytes", held, [found.kv_bytes[batch]], "B", batch=batch, context=max(lengths))
    return entries


def _block_bytes(runner: EngineRunner) -> int:
    """Bytes of the pool that really is allocated, per block."""
    backend: Any = runner.engine._backend
    return int(backend.kv_bytes) // int(backend.num_blocks)


def run(quick: bool = False) -> dict[str, Any]:
    """One thread, CPU seconds. The 256M checkpoint has random weights; its images make one tile each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sizes = replace(SMOLVLM_256M, longest_edge=SMOLVLM_256M.image_size)
            large = write_checkpoint(Path(folder) / "smolvlm-256m", sizes)
            say("plan: this machine's rates (1 of 5)")
            before = measure_machine(quick=quick)
            say("plan: the default model (2 of 5)")
            small_found = measure(Path(DEFAULT_MODEL), 12 if quick else 40)
            say("plan: this machine's rates again (3 of 5)")
            between = measure_machine(quick=quick)
            say("plan: a model of 256M (4 of 5)")
            large_found = measure(large, 1 if quick else 4)
            say("plan: this machine's rates again (5 of 5)")
            after = measure_machine(quick=quick)
            results = compare("default", Path(DEFAULT_MODEL), (before, between), small_found)
            results |= compare("smolvlm_256m_random", large, (between, after), large_found)
    finally:
        torch.set_num_threads(threads)
    worst = max(results, key=lambda name: results[name]["value"])
    headline = result(
        results[worst]["value"], "relative error", worst=worst, threads=1, calibration=describe(between)
    )
    return report("plan", {"max_rel_error": headline, **results})
