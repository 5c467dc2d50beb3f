"""Replicas and nodes inside the test's process: everything but Celery, over a real Redis.

Messages cross as JSON text, as the broker would carry them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from llm.request import Delta, Event, SamplingParams
from vlm.build import build_runner
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from vlm.spec import ModelSpec
from vlm.train.drawing.documents import make_document
from workers.cluster.names import GenerateJob, generate_queue
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.worker.replica import Replica
from workers.local.engine_runner import EngineRunner
from workers.local.preprocess_inline import InlinePreprocess
from workers.local.progress import STALL_S

OPTIONS = EngineOptions(kv_cache_mb=16, backend="torch")


class DirectReplica:
    """Takes its messages from `DirectEngine` in place of a Celery worker."""

    def __init__(
        self, name: str, url: str, runner: EngineRunner | None = None, stall_s: float = STALL_S
    ) -> None:
        self.crashed = threading.Event()
        self.taken: list[str] = []
        self.replica = Replica(
            name,
            url,
            lambda progress: runner or build_runner(OPTIONS, progress=progress),
            self.crashed.set,
            stall_s,
        )
        self.replica.start()

    def deliver(self, text: str) -> threading.Thread:
        self.taken.append(text)
        thread = threading.Thread(
            target=self.replica.run, args=(GenerateJob(**json.loads(text)),), daemon=True
        )
        thread.start()
        return thread


class DirectEngine(RemoteEngine):
    def __init__(self, url: str, replicas: list[DirectReplica], **options: Any) -> None:
        super().__init__(url, url, **options)
        self._by_queue = {generate_queue(direct.replica.name): direct for direct in replicas}

    def _send_task(self, queue: str, job: GenerateJob) -> None:
        self._by_queue[queue].deliver(json.dumps(asdict(job)))


@contextlib.contextmanager
def replicas(url: str, *names: str) -> Iterator[list[DirectReplica]]:
    made = [DirectReplica(name, url) for name in names]
    try:
        yield made
    finally:
        for direct in made:
            direct.replica.close()


@contextlib.asynccontextmanager
async def node(
    url: str, reached: list[DirectReplica], spec: ModelSpec, **options: Any
) -> AsyncIterator[tuple[Pipeline, DirectEngine]]:
    engine = DirectEngine(url, reached, revision=spec.revision, **options)
    pipeline = Pipeline(spec, InlinePreprocess(), engine)
    names = {direct.replica.name for direct in reached}
    await pipeline.start()
    try:
        async with asyncio.timeout(30):
            while not names <= set(engine.info["replicas"]):
                await asyncio.sleep(0.05)
        yield pipeline, engine
    finally:
        await pipeline.close()


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    make_document("shapes", 10**9 + seed, 1.0)[0].save(buffer, "PNG")
    return buffer.getvalue()


def question(data: bytes, text: str = "What is in the image?") -> list[ChatMessage]:
    return [ChatMessage("user", (ImageInput(data), text))]


async def ask(
    pipeline: Pipeline, name: str, data: bytes, params: SamplingParams | None = None
) -> list[Event]:
    prepared = pipeline.prepare(name, question(data), params or SamplingParams(max_tokens=24))
    return [event async for event in pipeline.run(prepared)]


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.choice == choice)
