"""`vlm worker generate`: a Celery thread pool whose tasks share one engine, so that they batch together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery.signals import worker_shutting_down

from workers.cluster.celery_app import default_name, make_app, passing_queue, thread_worker
from workers.cluster.names import GENERATE_TASK, GenerateJob, generate_queue
from workers.cluster.redis_client import check_access
from workers.cluster.worker.replica import Replica
from workers.contract.versions import known_fields
from workers.local.engine_runner import EngineRunner
from workers.local.progress import STALL_S, Progress

CONCURRENCY = 64  # requests taken from the queue at once; the engine orders and batches them


def run(
    broker: str,
    store: str,
    make_runner: Callable[[Progress], EngineRunner],
    concurrency: int = CONCURRENCY,
    name: str | None = None,
    stall_s: float = STALL_S,
) -> None:
    """Serves until SIGTERM (finishes what it has) or SIGINT; ends with 1 when the engine crashes or makes no
    progress for `stall_s`. Raises ValueError for a Redis of no use.

    name: of the replica, and of its queue `generate.NAME`; unique among those alive.
    """
    name = name or default_name()
    check_access(broker=broker, store=store)
    app = make_app(broker)
    replica = Replica(name, store, make_runner, on_crash=lambda: os._exit(1), stall_s=stall_s)

    @app.task(name=GENERATE_TASK)
    def generate(**message: Any) -> None:
        replica.run(GenerateJob(**known_fields(GenerateJob, message)))

    def drain(**_: object) -> None:
        replica.drain()

    worker_shutting_down.connect(drain, weak=False)
    worker = thread_worker(app, passing_queue(generate_queue(name)), concurrency, f"generate-{name}")
    replica.start()
    try:
        worker.start()
    finally:
        replica.close()
