"""Replicas and nodes over a real Redis whose engines are fakes: text prompts alone, in milliseconds.

Everything but Celery and the model is real; messages cross as JSON text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
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
    """Takes its messages from `FakeNode` in place of a Celery worker; its engine stops between two steps."""

    def __init__(self, name: str, url: str) -> None:
        self.taken: list[str] = []
        self.alter: Callable[[dict[str, Any]], object] = lambda message: None
        self._may_step = threading.Event()
        self._may_step.set()
        self.replica = Replica(name, url, lambda progress: self._held(fake_runner()), lambda: None)
        self.replica.start()

    def hold(self) -> None:
        self._may_step.clear()

    def go_on(self) -> None:
        self._may_step.set()

    def deliver(self, text: str) -> threading.Thread:
        self.taken.append(text)
        message = json.loads(text)
        self.alter(message)
        job = GenerateJob(**known_fields(GenerateJob, message))
        thread = threading.Thread(target=self.replica.run, args=(job,), daemon=True)
        thread.start()
        return thread

    def _held(self, runner: EngineRunner) -> EngineRunner:
        step = runner.step

        def when_allowed() -> list[Event]:
            return step() if self._may_step.wait(0.01) else []

        runner.step = when_allowed  # type: ignore[method-assign]
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
