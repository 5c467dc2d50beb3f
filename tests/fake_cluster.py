"""Replicas and nodes over a real Redis whose engines are fakes: text prompts alone, in milliseconds.

Everything but Celery and the model is real; messages cross as JSON text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from fake_runner import fake_runner

from llm.request import Event
from workers.cluster.names import GenerateJob, generate_queue
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.worker.replica import Replica
from workers.contract.versions import known_fields
from workers.local.engine_runner import EngineRunner


class FakeReplica:
    """Takes its messages from `FakeNode` in place of a Celery worker.

    `steps_at_once`: of its engine, ten times a second; 0 for as many as it can.
    `hold_after`: its engine stands still behind so many steps, until this is None.
    """

    def __init__(self, name: str, url: str) -> None:
        self.taken: list[str] = []
        self.alter: Callable[[dict[str, Any]], object] = lambda message: None
        self.steps_at_once = 0
        self.hold_after: int | None = None
        self._steps = 0
        self.replica = Replica(name, url, lambda progress: self._paced(fake_runner()), lambda: None)
        self.replica.start()

    def deliver(self, text: str) -> threading.Thread:
        self.taken.append(text)
        message = json.loads(text)
        self.alter(message)
        job = GenerateJob(**known_fields(GenerateJob, message))
        thread = threading.Thread(target=self.replica.run, args=(job,), daemon=True)
        thread.start()
        return thread

    def _paced(self, runner: EngineRunner) -> EngineRunner:
        step = runner.step

        def paced() -> list[Event]:
            self._steps += 1
            if self.steps_at_once and self._steps % self.steps_at_once == 0:
                time.sleep(0.1)
            while self.hold_after is not None and self._steps > self.hold_after:
                time.sleep(0.005)
            return step()

        runner.step = paced  # type: ignore[method-assign]
        return runner


class FakeNode(RemoteEngine):
    def __init__(self, url: str, replicas: list[FakeReplica], **options: Any) -> None:
        super().__init__(url, url, **options)
        self._by_queue = {generate_queue(fake.replica.name): fake for fake in replicas}

    def _send_task(self, queue: str, job: GenerateJob) -> None:
        self._by_queue[queue].deliver(json.dumps(asdict(job)))


@contextlib.asynccontextmanager
async def fake_node(url: str, reached: list[FakeReplica], **options: Any) -> AsyncIterator[FakeNode]:
    node = FakeNode(url, reached, revision="revision", **options)
    names = {fake.replica.name for fake in reached}
    await node.start()
    try:
        async with asyncio.timeout(30):
            while not names <= set(node.info["replicas"]):
                await asyncio.sleep(0.02)
        yield node
    finally:
        await node.close()
