"""Prediction against measurement: TTFT, TPOT and KV bytes, calibrated by `vlm doctor`'s figures alone."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llm.cost import Machine, Precision, decode_time, kv_bytes
from llm.request import Delta, Finished, Request, SamplingParams, WantVisual
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import preprocess
from preprocess.wire import to_bytes
from vlm.bench.load import ImageRequest, document, image_request
from vlm.bench.report import report, result
from vlm.build import build_runner
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.doctor import clock, describe, measure_machine, storage_of
from vlm.plan.catalog import PlannedModel, load_model
from vlm.plan.image import costs_of_images, plan_image
from vlm.spec import ModelSpec
from vlm.synthetic import SMOLVLM_256M, write_checkpoint
from workers.runner import EngineRunner

QUESTION = "What is in the image?"
OUTPUT = 24  # tokens of an answer
BATCHES = (1, 4)


class _Run:
    """Steps a runner with one question to the end, on a clock of CPU time."""

    def __init__(self, spec: ModelSpec, runner: EngineRunner) -> None:
        self.spec, self.runner, self.now = spec, runner, clock()
        self.peak_blocks = 0

    def answer(self, asked: list[ImageRequest]) -> tuple[float, list[float]]:
        """(seconds to the first token, seconds of each decode step with all sequences running)."""
        images = {key: data for one in asked for key, data in one.images.items()}
        started = self.now()
        for one in asked:
            self.runner.submit(one.request)
        first, steps = 0.0, []
        ended = 0
        while ended < len(asked):
            before = self.now()
            events = self.runner.step()
            after = self.now()
            tokens = [event for event in events if isinstance(event, Delta)]
            if tokens and not first:
                first = after - started
            elif len(tokens) == len(asked):
                steps.append(after - before)
            self.peak_blocks = max(self.peak_blocks, self.runner.engine.stats().kv_blocks_held)
            ended += sum(isinstance(event, Finished) for event in events)
            for event in events:
                if isinstance(event, WantVisual):
                    tiles = preprocess(images[event.key], self.spec.preprocess_spec("auto"), ImageLimits())
                    self.runner.put_tiles(event.key, to_bytes(tiles))
        return first, steps


def _requests(spec: ModelSpec, count: int, seed: int) -> list[ImageRequest]:
    """Questions about images of their own, so that no cache helps."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    return [
        image_request(spec, f"{seed}-{i}", [document(1000 * seed + i)], QUESTION, params)
        for i in range(count)
    ]


def predict_ttft(
    model: PlannedModel, machine: Machine, precision: Precision, request: Request, image: bytes
) -> float:
    """Seconds of preprocessing, tower and prefill for one image and its question."""
    assert model.tower is not None and model.tiling is not None
    info = probe(image, ImageLimits())
    costs = costs_of_images([(info.width, info.height)], model.tiling, model.tower, model.decoder)
    text = request.prompt.num_tokens - request.prompt.num_image_tokens
    plan = plan_image(model.decoder, model.tower, machine, [costs[0].tiles], text, precision, per_image=costs)
    return plan.ttft_s


def compare(
    name: str, directory: Path, machine: Machine, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Every prediction beside its measurement for one checkpoint."""
    model, spec = load_model(str(directory)), ModelSpec.load(directory)
    precision = storage_of(directory)
    options = EngineOptions(model=str(directory), kv_cache_mb=256, prefix_cache=False)
    runner = build_runner(options)
    run = _Run(spec, runner)
    entries: dict[str, Any] = {}

    def enter(what: str, predicted: float, measured: float, unit: str, **more: Any) -> None:
        error = abs(predicted - measured) / measured
        progress(f"{name} {what}: predicted {predicted:.4g} {unit}, measured {measured:.4g}")
        entries[f"{name}_{what}"] = result(
            error,
            "relative error",
            predicted=predicted,
            measured=measured,
            measured_unit=unit,
            model=name,
            dtype=f"weights {precision.weight_bytes:g} B, KV {precision.kv_bytes:g} B",
            threads=1,
            **more,
        )

    run.answer(_requests(spec, 1, 0))  # warms up
    for batch in BATCHES:
        firsts, steps, blocks = [], [], 0
        for number in range(rounds):
            run.peak_blocks = 0
            asked = _requests(spec, batch, 10 * batch + number + 1)
            first, gaps = run.answer(asked)
            firsts.append(first)
            steps += gaps
            blocks = run.peak_blocks
        prompt = asked[0].request.prompt.num_tokens
        context = prompt + OUTPUT // 2
        if batch == 1:
            image = next(iter(asked[0].images.values()))
            ttft = predict_ttft(model, machine, precision, asked[0].request, image)
            enter("ttft_ms", ttft * 1e3, statistics.median(firsts) * 1e3, "ms", batch=1, context=prompt)
        tpot = decode_time(model.decoder, machine, batch, context, precision).seconds
        enter(
            f"tpot_b{batch}_ms",
            tpot * 1e3,
            statistics.median(steps) * 1e3,
            "ms",
            batch=batch,
            context=context,
        )
        lengths = [
            one.request.prompt.num_tokens + OUTPUT - 1 for one in asked
        ]  # the last token is not cached
        block_size = int(runner.info()["block_size"])
        predicted = sum(kv_bytes(model.decoder, n, precision.kv_bytes, block_size) for n in lengths)
        measured = blocks * _block_bytes(runner)
        enter(f"kv_b{batch}_bytes", predicted, measured, "B", batch=batch, context=max(lengths))
    return entries


def _block_bytes(runner: EngineRunner) -> int:
    """Bytes of the pool that really is allocated, per block."""
    backend: Any = runner.engine._backend
    pool = backend.pool if hasattr(backend, "pool") else backend._pool
    return int(pool.nbytes) // int(backend.num_blocks)


def run(quick: bool = False, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """One thread, CPU seconds. The 256M checkpoint has random weights; its images make one tile each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine = measure_machine(quick=quick)
        rounds = 3 if quick else 9
        results = compare("default", Path(DEFAULT_MODEL), machine, 4 * rounds, progress)
        with tempfile.TemporaryDirectory() as folder:
            sizes = replace(SMOLVLM_256M, longest_edge=SMOLVLM_256M.image_size)
            directory = write_checkpoint(Path(folder) / "smolvlm-256m", sizes)
            results |= compare("smolvlm_256m_random", directory, machine, 1 if quick else 3, progress)
    finally:
        torch.set_num_threads(threads)
    worst = max(results, key=lambda name: results[name]["value"])
    headline = result(
        results[worst]["value"], "relative error", worst=worst, threads=1, calibration=describe(machine)
    )
    return report("plan", {"max_rel_error": headline, **results})
