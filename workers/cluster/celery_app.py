"""The Celery application: JSON only, late acknowledgement, one message at a time."""

from __future__ import annotations

import socket
import sys
import uuid
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from kombu import Exchange, Queue
from kombu.transport import TRANSPORT_ALIASES

PREPROCESS_QUEUE = "preprocess"
TILES_TASK = "preprocess.tiles"
BATCH_PRIORITY = 9  # the last of Redis's four lists per queue; interactive messages are in the first
BATCH_SUFFIX = "\x06\x169"  # of its name, by the transport's rule

PASSING_S = 3600.0  # above any deadline of what such a queue holds
_TRANSPORT = "vlm-redis"
_SOCKET_TIMEOUT_S = 5.0  # above the second that a worker's blocking read takes


def make_app(broker_url: str) -> Celery:
    """No result backend: results travel through the blob store, states through the ledger."""
    app = Celery("vlm", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        # whoever waits for a lost worker's task sends it again, sooner than the broker would
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        task_default_queue=PREPROCESS_QUEUE,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=_SOCKET_TIMEOUT_S,
        broker_transport_options={
            "socket_timeout": _SOCKET_TIMEOUT_S,
            "socket_connect_timeout": _SOCKET_TIMEOUT_S,
            "socket_keepalive": True,
        },
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    if broker_url.startswith(("redis://", "rediss://")):
        # messages about the connection show the name
        TRANSPORT_ALIASES[_TRANSPORT] = "workers.cluster.celery_transport:LastingTransport"
        app.conf.broker_transport = _TRANSPORT
    return app


def default_name() -> str:
    """Of a worker: this host's and a random part."""
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


@worker_ready.connect
def _say_ready(sender: Any, **_: Any) -> None:
    """Celery is quiet; an operator wants to see that the worker is ready."""
    print(f"{sender.hostname} is ready", file=sys.__stderr__, flush=True)  # not as a warning in its log


def passing_queue(name: str) -> Queue:
    """A queue of a worker that may go for good: what is in it ends PASSING_S after the last message came.

    Workers that still run forget its place among Celery's queues some time later.
    """
    return Queue(name, Exchange(name), name, expires=PASSING_S)


def thread_worker(app: Celery, queue: str | Queue, concurrency: int, name: str) -> Any:
    """A worker on one queue whose tasks are threads of this process. They keep their own deadlines."""
    if isinstance(queue, Queue):
        app.conf.task_queues = [queue]
        queue = str(queue.name)
    return app.Worker(
        pool="threads",
        concurrency=concurrency,
        queues=[queue],
        hostname=f"{name}@{socket.gethostname()}",
        loglevel="WARNING",
        without_mingle=True,
        without_gossip=True,
        quiet=True,
    )
