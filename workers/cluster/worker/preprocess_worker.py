"""`vlm worker preprocess`: Celery's prefork pool with our tasks on the preprocess queue."""

from __future__ import annotations

import socket

from workers.cluster.blobs import open_store
from workers.cluster.celery_app import PREPROCESS_QUEUE, default_name, make_app
from workers.cluster.ledger import WorkLedger
from workers.cluster.redis_client import check_access, connect
from workers.cluster.worker.tasks import register_tasks
from workers.contract.stages import DecodeLimits

_PATIENCE_S = 60.0  # a worker keeps its finished tiles so long for a Redis that is away


def run(broker: str, store: str, concurrency: int, limits: DecodeLimits | None = None) -> None:
    """Serves until SIGTERM (finishes what it has) or SIGINT. Raises ValueError for a Redis of no use.

    concurrency: decode processes, one thread each.
    """
    check_access(broker=broker, store=store)
    app = make_app(broker)
    blobs = open_store(store, patience_s=_PATIENCE_S)
    ledger = WorkLedger(connect(store, _PATIENCE_S), PREPROCESS_QUEUE)
    register_tasks(app, blobs, ledger, limits or DecodeLimits())
    worker = app.Worker(
        pool="prefork",
        concurrency=concurrency,
        queues=[PREPROCESS_QUEUE],
        hostname=f"preprocess-{default_name()}@{socket.gethostname()}",
        loglevel="WARNING",
        without_mingle=True,
        without_gossip=True,
        quiet=True,
    )
    worker.start()
