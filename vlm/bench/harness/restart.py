"""A second question about an image after the engine was killed, beside the first one ever: `--kv-disk`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from llm.request import SamplingParams
from vlm.arithmetic import settled
from vlm.bench.harness.results import result, say, spread
from vlm.build import engine_command
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from vlm.spec import ModelSpec
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_inline import InlinePreprocess

_QUIET_S = 1.0  # without a new file, after which all is on disk


def restart(directory: Path, images: list[bytes]) -> dict[str, dict[str, Any]]:
    """Wall time to the first token, each image cold, then after a kill -9, with another question."""
    with tempfile.TemporaryDirectory() as folder:
        cold, warm, stats = asyncio.run(_measure(directory, images, Path(folder)))
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    ratios = [before / after for before, after in zip(cold, warm, strict=True)]
    return {
        "restart_cold_over_warm_ttft": result(
            min(ratios),
            "times",
            spread=spread(ratios),
            cold_s=[round(value, 2) for value in cold],
            warm_s=[round(value, 3) for value in warm],
            images=len(images),
            megabytes_on_disk=round(num_bytes / 1e6, 1),
            blocks_read=stats["engine"]["kv_saved_read"],
            tiles_encoded_after=stats["encoder"]["tiles"],
        )
    }


async def _measure(
    directory: Path, images: list[bytes], folder: Path
) -> tuple[list[float], list[float], dict[str, Any]]:
    options = settled(EngineOptions(model=str(directory), kv_cache_mb=1500, kv_disk=str(folder)))
    engine = EngineProcess(engine_command(options))
    pipeline = Pipeline(ModelSpec.load(directory, arithmetic=options.arithmetic), InlinePreprocess(), engine)
    await pipeline.start()
    try:
        cold = [await _ttft_s(pipeline, image, "What is the total?") for image in images]
        await _written(folder)
        say("engine: the engine is killed")
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        while not (engine.restarts and engine.ready):
            await asyncio.sleep(0.05)
        warm = [await _ttft_s(pipeline, image, "Who is the seller?") for image in images]
        return cold, warm, await engine.stats()
    finally:
        await pipeline.close()


async def _ttft_s(pipeline: Pipeline, image: bytes, question: str) -> float:
    chat = [ChatMessage("user", (ImageInput(image), question))]
    prepared = pipeline.prepare(f"{question} {hash(image)}", chat, SamplingParams(max_tokens=8))
    return (await pipeline.answer(prepared)).timings.ttft_ms / 1e3


async def _written(folder: Path) -> None:
    before = -1
    while (now := sum(1 for _ in folder.rglob("*"))) != before:
        before = now
        await asyncio.sleep(_QUIET_S)
