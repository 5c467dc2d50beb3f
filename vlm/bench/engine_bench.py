"""`vlm bench engine`: what scheduling, caching and batching bring, on the default model."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from llm.engine_config import EngineConfig
from llm.request import Prompt, Request, SamplingParams
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from vlm.bench.decoding.span_stalls import span_stalls
from vlm.bench.harness.engine_load import (
    Driver,
    ImageRequest,
    document,
    image_request,
    scheduled_requests,
    tiled_photo,
)
from vlm.bench.harness.restart import restart
from vlm.bench.harness.results import in_turn, report, result, spread
from vlm.build import build_runner
from vlm.config import EngineOptions
from vlm.plan.machine.synthetic import SMOLVLM_256M, write_checkpoint
from vlm.prompt import Message
from vlm.spec import ModelSpec

OPTIONS = EngineOptions(kv_cache_mb=256)
QUESTIONS = ("What is in the image?", "How many shapes are there?", "Read the text.", "Describe the image.")


def slot_use(spec: ModelSpec, count: int) -> dict[str, Any]:
    """Sequences computed over slots offered, from the engine's own counters, eight slots.

    Whole prompts in one step: a chunked prompt would hold its slot for many steps, in both ways alike.
    """
    results = {}
    throughput = EngineConfig(max_running=8, step_stretch=None, max_step_tokens=4096, prefix_cache=False)
    for batching in ("static", "continuous"):
        runner = build_runner(OPTIONS, replace(throughput, batching=batching))
        driver = Driver(spec, runner)
        for request in scheduled_requests(spec, count):
            driver.submit(request)
        started = time.process_time()
        driver.run()
        stats = runner.engine.stats()
        results[f"slot_use_{batching}"] = result(
            stats.slot_use,
            "fraction",
            model=spec.name,
            requests=count,
            slots=8,
            steps=stats.steps,
            generated_tokens=stats.generated_tokens,
            cpu_s=round(time.process_time() - started, 1),
        )
    return results


def stalls(spec: ModelSpec, rounds: int) -> dict[str, Any]:
    """Longest gap over the median gap of eight streams while a 2,000-token prompt arrives."""
    whole = EngineConfig(max_running=16, max_step_tokens=4096, step_stretch=None, prefix_cache=False)
    chunked = EngineConfig(max_running=16, prefix_cache=False)
    prompt_tokens = min(2000, spec.context_length - 8)
    results = {}
    for name, config in (("chunked", chunked), ("unchunked", whole)):
        runner = build_runner(OPTIONS, config)
        ratios, cpu_ratios = [], []
        for number in range(rounds):
            driver = Driver(spec, runner)
            for i in range(8):
                ids = tuple((number + 7 * i + j) % spec.decoder.vocab_size for j in range(64))
                driver.submit(
                    Request(f"{number}-{i}", Prompt(ids), SamplingParams(max_tokens=400, ignore_eos=True))
                )
            long_ids = tuple((number + 3 * j) % spec.decoder.vocab_size for j in range(prompt_tokens))
            long = Request(f"{number}-long", Prompt(long_ids), SamplingParams(max_tokens=4))

            def arrive(step: int, driver: Driver = driver, long: Request = long) -> None:
                if step == 100:
                    driver.submit(long)

            driver.run(arrive)
            streams = [driver.traces[f"{number}-{i}"] for i in range(8)]
            ratios.append(_max_over_median([gap for trace in streams for gap in trace.gaps_s[5:]]))
            cpu_ratios.append(_max_over_median([gap for trace in streams for gap in trace.cpu_gaps_s[5:]]))
        about = {"model": spec.name, "batch": 8, "arriving_prompt_tokens": prompt_tokens}
        results[f"itl_max_over_p50_{name}"] = result(
            statistics.median(ratios), "ratio", **about, spread=spread(ratios)
        )
        results[f"itl_max_over_p50_{name}_cpu"] = result(
            statistics.median(cpu_ratios), "ratio of CPU time", **about, spread=spread(cpu_ratios)
        )
    return results


def _max_over_median(values: Sequence[float]) -> float:
    return max(values) / statistics.median(values)


def _documents(spec: ModelSpec, tiles: int, count: int) -> Iterator[bytes]:
    """Documents that the model's rule cuts into this many tiles."""
    seed = 1000
    while count:
        data = document(seed, "receipt")
        info = probe(data, ImageLimits())
        if spec.preprocess.rule.grid(info.width, info.height).num_tiles == tiles:
            count -= 1
            yield data
        seed += 1


def first_tokens(spec: ModelSpec, rounds: int) -> dict[str, Any]:
    """Time to the first token: a new image, the same image again, and the question without an image.

    Each image has five tiles. A round's questions are equally long and new: no question is cached.
    """
    runner = build_runner(OPTIONS)
    params = SamplingParams(max_tokens=8)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "text": []}
    tiles = 5
    for number, data in enumerate(_documents(spec, tiles, rounds + 1)):
        driver = Driver(spec, runner)
        for kind, lines in (("cold", 100), ("warm", 300), ("text", 600)):
            name, question = f"{kind}{number}", f"Read line {lines + number}."
            if kind == "text":
                builder = spec.prompt_builder
                driver.submit(Request(name, builder.build([Message("user", (question,))]), params))
            else:
                asked = image_request(spec, name, [data], question, params)
                driver.submit(asked.request, asked.images)
            driver.run()
            if number:  # the first round loads and compiles
                times[kind].append(driver.traces[name].ttft_s)
    about = {"model": spec.name, "dtype": "float32", "threads": OPTIONS.threads, "batch": 1, "tiles": tiles}
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    results = {
        f"ttft_{kind}_ms": result(
            1e3 * medians[kind], "ms", **about, spread=spread([1e3 * v for v in values])
        )
        for kind, values in times.items()
    }
    results["cold_over_warm_ttft"] = result(medians["cold"] / medians["warm"], "ratio", **about)
    results["warm_over_text_ttft"] = result(medians["warm"] / medians["text"], "ratio", **about)
    return results


def batching(spec: ModelSpec, rounds: int) -> dict[str, Any]:
    """Tokens per CPU-second over 16 mixed image requests, beside transformers' padded batch of 16."""
    from vlm.bench.harness.opponents import TransformersVlm

    images = [document(i, ("shapes", "sign", "receipt", "label")[i % 4]) for i in range(16)]
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(16)]
    lengths = [20 + 12 * (i % 8) for i in range(16)]
    opponent = TransformersVlm(spec.directory, threads=OPTIONS.threads)
    ratios, ours, theirs = [], [], []
    for number in range(rounds + 1):
        runner = build_runner(OPTIONS)
        driver = Driver(spec, runner)
        started = time.process_time()
        for i in range(16):
            params = SamplingParams(max_tokens=lengths[i], ignore_eos=True)
            asked = image_request(spec, f"b{number}-{i}", [images[i]], questions[i], params)
            driver.submit(asked.request, asked.images)
        driver.run()
        mine = sum(lengths) / (time.process_time() - started)
        started = time.process_time()
        opponent.generate_batch(images, questions, lengths)
        other = sum(lengths) / (time.process_time() - started)
        if number:
            ours.append(mine)
            theirs.append(other)
            ratios.append(mine / other)
    about = {"model": spec.name, "dtype": "float32", "threads": OPTIONS.threads, "batch": 16}
    return {
        "batching_over_transformers_16": result(
            statistics.median(ratios), "ratio", **about, context="image prompts", spread=spread(ratios)
        ),
        "tokens_per_cpu_s_16": result(statistics.median(ours), "tokens/CPU-s", **about),
        "transformers_tokens_per_cpu_s_16": result(statistics.median(theirs), "tokens/CPU-s", **about),
    }


def speculation(spec: ModelSpec, rounds: int) -> dict[str, Any]:
    """Time from first to last token without n-gram guesses over that with them; batch 1, equal answers."""
    params = SamplingParams(max_tokens=200)
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    builder = spec.prompt_builder
    free = builder.build([Message("user", ("Describe a day in a city that you know.",))])
    workloads: dict[str, Callable[[str], ImageRequest]] = {
        "": lambda name: image_request(spec, name, [document(4, "receipt")], "Read the text.", params),
        "_free_text": lambda name: ImageRequest(Request(name, free, params), {}),
        "_free_text_200": lambda name: ImageRequest(Request(name, free, endless), {}),
    }
    modes: tuple[Literal["off", "ngram"], ...] = ("off", "ngram")
    runners = {mode: build_runner(OPTIONS, EngineConfig(speculation=mode)) for mode in modes}
    results = {}
    for suffix, make in workloads.items():
        ratios, num_tokens = [], 0
        before = runners["ngram"].engine.stats()
        for number in range(rounds + 1):
            seconds, told = {}, {}
            for mode, runner in runners.items():
                driver = Driver(spec, runner)
                asked = make(f"{suffix}{number}")
                driver.submit(asked.request, asked.images)
                driver.run()
                (trace,) = driver.traces.values()
                seconds[mode] = trace.token_times[-1] - trace.token_times[0]
                told[mode] = trace.token_ids
            if told["off"] != told["ngram"]:
                raise RuntimeError("speculation changed an answer")
            num_tokens = len(told["off"])
            if number:
                ratios.append(seconds["off"] / max(seconds["ngram"], 1e-9))
        after = runners["ngram"].engine.stats()
        results[f"speculation_speedup{suffix}"] = result(
            statistics.median(ratios),
            "ratio",
            model=spec.name,
            batch=1,
            answer_tokens=num_tokens,
            drafted=after.drafted_tokens - before.drafted_tokens,
            accepted=after.accepted_tokens - before.accepted_tokens,
            spread=spread(ratios),
        )
    return results


def run(quick: bool = False, parts: Sequence[str] = ("scheduling",)) -> dict[str, Any]:
    spec = ModelSpec.load(OPTIONS.model)
    phases: dict[str, Callable[[], dict[str, Any]]] = {}
    if "scheduling" in parts:
        phases = {
            "slots in use": lambda: slot_use(spec, 64 if quick else 512),
            "stalls": lambda: stalls(spec, 1 if quick else 5),
            "first tokens": lambda: first_tokens(spec, 5 if quick else 30),
            "batching": lambda: batching(spec, 1 if quick else 5),
            "speculation": lambda: speculation(spec, 3 if quick else 15),
        }
    if "span" in parts:
        phases["an image span beside decodes"] = lambda: span_stalls(1 if quick else 5)
    if "restart" in parts:
        phases["a question after a kill"] = lambda: _restart(1 if quick else 3)
    return report("engine", in_turn("engine", phases))


def _restart(num_images: int) -> dict[str, Any]:
    """On a SmolVLM-256M-shaped checkpoint: its images are worth keeping."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "smolvlm-256m", SMOLVLM_256M)
        return restart(directory, [tiled_photo(number) for number in range(num_images)])
