"""A pipeline whose engine answers from the image's key, and folders of drawn pages. No weights, no torch."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from llm.request import Delta, Event, Failed, Finished, Request, Timings, Usage, VisualKey, WantVisual
from preprocess.pages import PageLimits
from vlm.caption.caption_runner import CaptionRun, RunOptions
from vlm.caption.input_documents import DocumentReader
from vlm.caption.inputs import find_sources
from vlm.caption.journal import Journal
from vlm.caption.page_answers import PageAnswerer
from vlm.caption.presets import PageQuestion, make_question
from vlm.caption.rows import RowContext
from vlm.caption.stats import RunStats
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.contract.engine_client import EngineUnavailable
from workers.contract.tiles_handle import TilesHandle
from workers.local.page_drawing import PageRenderer
from workers.local.preprocess_inline import InlinePreprocess

TEXT_TOKENS = 4


@lru_cache(maxsize=1)
def default_spec() -> ModelSpec:
    return ModelSpec.load("default")


class FakeEngine:
    """`EngineClient` that wants every image once and then answers with a text made of its keys."""

    def __init__(
        self, on_submit: Callable[[Request], Event | None] | None = None, delay_s: float = 0.0
    ) -> None:
        self._on_submit = on_submit
        self._delay_s = delay_s
        self._tiles: dict[VisualKey, asyncio.Future[tuple[str, str] | None]] = {}
        self.ready = True
        self.submitted: list[Request] = []
        self.running = 0
        self.max_running = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def submit(self, request: Request) -> AsyncIterator[Event]:
        if not self.ready:
            raise EngineUnavailable("down")
        self.submitted.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if self._on_submit and (event := self._on_submit(request)):
                yield event
                return
            for key in dict.fromkeys(span.key for span in request.prompt.spans):
                future = self._tiles.setdefault(key, asyncio.get_running_loop().create_future())
                if not future.done():
                    yield WantVisual(request.id, key)
                if failure := await future:
                    del self._tiles[key]
                    yield Failed(request.id, *failure)
                    return
            await self.gate.wait()
            await asyncio.sleep(self._delay_s)
            yield Delta(request.id, 0, (1,), text_for(request))
            usage = Usage(request.prompt.num_tokens, request.prompt.num_image_tokens, 0, TEXT_TOKENS)
            yield Finished(request.id, 0, "stop", usage, Timings(total_ms=float(len(self.submitted))))
        finally:
            self.running -= 1

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        if not self._tiles[key].done():
            self._tiles[key].set_result(None)

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        if not self._tiles[key].done():
            self._tiles[key].set_result((code, message))

    async def stats(self) -> dict[str, Any]:
        return {}

    async def clear_cache(self) -> None:
        self._tiles.clear()


def text_for(request: Request) -> str:
    keys = dict.fromkeys(span.key[:12] for span in request.prompt.spans)
    return "\n".join(keys) if keys else "no image"


def fake_pipeline(engine: FakeEngine) -> Pipeline:
    return Pipeline(default_spec(), InlinePreprocess(), engine)


async def caption(
    inputs: list[str],
    journal: Journal,
    engine: FakeEngine | None = None,
    *,
    question: PageQuestion | None = None,
    revision: str = "r" * 32,
    options: RunOptions | None = None,
    started: Callable[[CaptionRun], None] | None = None,
) -> RunStats:
    """One run over inputs with a fake engine and the real readers."""
    pipeline = fake_pipeline(engine or FakeEngine())
    question = (question or make_question(preset="caption")).resolved(pipeline.spec)
    limits = PageLimits(dpi=question.dpi)
    renderer = PageRenderer(limits)
    context = RowContext(question.digest, question.preset, "fake", revision)
    reader = DocumentReader(renderer, pipeline.limits, limits)
    run = CaptionRun(PageAnswerer(pipeline, journal, 0.5), journal, reader, question, context, options)
    if started:
        started(run)
    try:
        return await run.run(find_sources(inputs))
    finally:
        await renderer.close()
        await pipeline.close()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page_image(number: int, size: tuple[int, int] = (96, 96)) -> Image.Image:
    """A page that no other number draws alike."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((4, 4), f"page {number}", fill="black")
    rng = Random(number)
    for _ in range(6):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        draw.rectangle((x, y, x + 9, y + 9), fill=(rng.randrange(256), rng.randrange(256), 0))
    return image


def png(number: int, size: tuple[int, int] = (96, 96)) -> bytes:
    buffer = io.BytesIO()
    page_image(number, size).save(buffer, "PNG")
    return buffer.getvalue()


def pdf(numbers: list[int]) -> bytes:
    buffer = io.BytesIO()
    first, *rest = [page_image(number) for number in numbers]
    first.save(buffer, "PDF", save_all=True, append_images=rest, resolution=96.0)
    return buffer.getvalue()


def tiff(numbers: list[int], **options: Any) -> bytes:
    buffer = io.BytesIO()
    first, *rest = [page_image(number) for number in numbers]
    first.save(buffer, "TIFF", save_all=True, append_images=rest, **options)
    return buffer.getvalue()


def run(out: Path, *inputs: str, engine: FakeEngine | None = None, compact: bool = True, **more: Any) -> Any:
    journal = Journal(out)
    try:
        stats = asyncio.run(caption(list(inputs or ["in"]), journal, engine, **more))
        if compact:
            journal.compact()
        return stats
    finally:
        journal.close()
