"""`vlm bench caption`: whole runs over generated folders.

Parts: pages (beside a loop of transformers), orders (instruction or image first), reading (character error
rate beside the card's), beside (interactive requests while a batch runs), kills (SIGKILL, restart), memory.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.request import SamplingParams
from preprocess.pages import PageLimits
from vlm.bench import PARTS
from vlm.bench.captioning.caption_beside import beside_interactive
from vlm.bench.captioning.caption_kills import kills
from vlm.bench.captioning.caption_memory import memory
from vlm.bench.captioning.caption_reading import reading
from vlm.bench.harness.bench_pages import draw_page, encode
from vlm.bench.harness.results import report, result, say, spread, tree_cpu_seconds
from vlm.build import build_served_pipeline
from vlm.caption.caption_job import engine_options, make_run
from vlm.caption.caption_runner import RunOptions
from vlm.caption.inputs import find_sources
from vlm.caption.journal import Journal
from vlm.caption.presets import Order, PageQuestion, make_question
from vlm.caption.stats import RunStats
from vlm.config import DEFAULT_MODEL, ServeConfig
from vlm.pipeline import Pipeline
from workers.local.page_drawing import PageRenderer

TOKENS = 160  # of every page's answer, where lengths are fixed
LONG_PROMPT = " ".join(
    ["Read every line of the document in order, and write each of them down as it is."] * 6
)
ENGINE = engine_options("default", 1, make_question(prompt=LONG_PROMPT, max_tokens=TOKENS))
WINDOW = ENGINE.max_running * 3 // 2
ABOUT = {"model": "vlm-default", "dtype": ENGINE.dtype, "threads": ENGINE.threads}


def run(quick: bool = False, parts: Sequence[str] = PARTS["caption"]) -> dict[str, Any]:
    """Says on stderr what it is at."""
    results: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as scratch:
            started = time.perf_counter()
            results |= _part(part, Path(scratch), quick)
            say(f"{part}: {time.perf_counter() - started:.0f} s")
    return report("caption", results)


def _part(part: str, root: Path, quick: bool) -> dict[str, Any]:
    match part:
        case "pages":
            return asyncio.run(over_transformers(root, 8 if quick else 32, 1 if quick else 3))
        case "orders":
            return asyncio.run(prompt_orders(root, 16 if quick else 100))
        case "reading":
            return reading(root, 40 if quick else 200)
        case "beside":
            return beside_interactive(root, 10 if quick else 150, 1000 if quick else 6000)
        case "kills":
            return kills(root, 120 if quick else 500)
        case _:
            return memory(root, (100, 200) if quick else (100, 500))


def fixed_length(prompt: str, order: Order = "auto", tokens: int = TOKENS) -> PageQuestion:
    return PageQuestion(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), order=order, dpi=72)


@asynccontextmanager
async def running_pipeline() -> AsyncIterator[Pipeline]:
    """The command's own: engine in a process, one decode process."""
    pipeline = build_served_pipeline(ServeConfig(decode_processes=1), ENGINE)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def caption(pipeline: Pipeline, folder: Path, question: PageQuestion, window: int = WINDOW) -> RunStats:
    """One run into a fresh output, with cold caches."""
    await pipeline.engine.clear_cache()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        journal = Journal(Path(scratch) / "out.jsonl")
        renderer = PageRenderer(PageLimits(dpi=question.dpi))
        try:
            made = await make_run(pipeline, journal, renderer, question, RunOptions(window=window))
            return await made.run(find_sources([str(folder)]))
        finally:
            await renderer.close()
            journal.close()


@dataclass(frozen=True, slots=True)
class Rate:
    pages_per_s: float
    cpu_s_per_page: float


async def over_transformers(root: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """Distinct pages, 160 tokens each; the opponent's better batch of 1 and 4; taken in turn."""
    from vlm.bench.harness.opponents import TransformersVlm

    folder = root / "distinct"
    folder.mkdir()
    for number in range(num_pages):
        (folder / f"{number}.png").write_bytes(encode(draw_page(number), "PNG"))
    paths = sorted(folder.iterdir())[:8]
    question = fixed_length("Read the text.")
    opponent = TransformersVlm(Path(DEFAULT_MODEL), threads=ENGINE.threads)
    _transformers_loop(opponent, paths[:4], 4)  # warm-up
    ours: list[Rate] = []
    theirs: dict[int, list[Rate]] = {1: [], 4: []}
    async with running_pipeline() as pipeline:
        await caption(pipeline, folder, question)
        for _ in range(rounds):
            cpu = tree_cpu_seconds()
            stats = await caption(pipeline, folder, question)
            cpu = tree_cpu_seconds() - cpu
            ours.append(Rate(stats.pages_done / stats.elapsed_s, cpu / stats.pages_done))
            for batch, rates in theirs.items():
                rates.append(_transformers_loop(opponent, paths[: 2 * batch], batch))
    best = max(theirs, key=lambda batch: statistics.median(rate.pages_per_s for rate in theirs[batch]))
    wall = [a.pages_per_s / b.pages_per_s for a, b in zip(ours, theirs[best], strict=True)]
    cpu_ratios = [b.cpu_s_per_page / a.cpu_s_per_page for a, b in zip(ours, theirs[best], strict=True)]
    about = {**ABOUT, "tokens_per_page": TOKENS, "window": WINDOW}
    return {
        "over_transformers_pages": result(
            statistics.median(wall),
            "times",
            **about,
            batch=best,
            over_in_cpu_seconds=round(statistics.median(cpu_ratios), 2),
            transformers_pages_per_min=round(60 * _median(theirs[best]), 1),
            spread=spread(wall),
        ),
        "pages_per_min": result(60 * _median(ours), "pages/min", **about, batch=ENGINE.max_running),
        "cpu_s_per_page": result(statistics.median(rate.cpu_s_per_page for rate in ours), "CPU-s", **about),
    }


def _median(rates: Sequence[Rate]) -> float:
    return statistics.median(rate.pages_per_s for rate in rates)


def _transformers_loop(opponent: Any, paths: Sequence[Path], batch: int) -> Rate:
    """Files in, texts out, `batch` at a time."""
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(paths), batch):
        chunk = paths[start : start + batch]
        ids = opponent.generate_batch(
            [path.read_bytes() for path in chunk], ["Read the text."] * len(chunk), [TOKENS] * len(chunk)
        )
        opponent.processor.batch_decode(ids[:, -TOKENS:], skip_special_tokens=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Rate(len(paths) / wall, cpu / len(paths))


async def prompt_orders(root: Path, num_pages: int) -> dict[str, Any]:
    """A long instruction before the page and behind it, two tokens an answer."""
    folder = root / "orders"
    folder.mkdir()
    for number in range(num_pages):
        (folder / f"{number}.png").write_bytes(encode(draw_page(2000 + number, max_scale=2.0), "PNG"))
    results = {}
    orders: tuple[Order, ...] = ("instruction-first", "image-first")
    async with running_pipeline() as pipeline:
        for order in orders:
            cpu = tree_cpu_seconds()
            stats = await caption(pipeline, folder, fixed_length(LONG_PROMPT, order, 2))
            cpu = tree_cpu_seconds() - cpu
            name = order.replace("-", "_")
            about = {**ABOUT, "batch": ENGINE.max_running, "context": stats.prompt_tokens // num_pages}
            cached = stats.cached_tokens / stats.prompt_tokens
            results[f"cached_fraction_{name}"] = result(cached, "of prompt tokens", **about)
            results[f"cpu_s_per_page_{name}"] = result(cpu / num_pages, "CPU-s", **about)
    return results
