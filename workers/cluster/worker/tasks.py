"""The tasks of a preprocess worker. Never imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from types import TracebackType
from typing import Any

from celery import Celery
from celery.signals import worker_process_init
from redis import RedisError

from preprocess.formats.libtiff import prepare
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.types import ImageError
from preprocess.wire import to_bytes
from workers.cluster.blobs import BlobStore, BlobStoreFull
from workers.cluster.celery_app import TILES_TASK
from workers.cluster.ledger import HEARTBEAT_S, Outcome, WorkLedger
from workers.cluster.names import TilesJob, waited_s
from workers.cluster.redis_client import AWAY
from workers.contract.loops import LoopThread
from workers.contract.stages import MAX_ATTEMPTS, DecodeLimits, overloaded, processing_failed
from workers.contract.versions import known_fields
from workers.local.process_limits import OUT_OF_MEMORY_EXIT, limit_cpu, limit_memory, unlimit_cpu

TILES_TTL_S = 120.0
UNWANTED_BEATS = 4


def register_tasks(app: Celery, store: BlobStore, ledger: WorkLedger, limits: DecodeLimits) -> None:
    """store, ledger: of a client that waits for Redis to come back (`connect(patience_s=...)`)."""

    @app.task(name=TILES_TASK, bind=True)
    def tiles(task: Any, **message: Any) -> None:
        with contextlib.suppress(RedisError):
            ledger.note_wait(waited_s(task.request.headers, ledger.clock))
        try:
            run_tiles_job(TilesJob(**known_fields(TilesJob, message)), store, ledger)
        except MemoryError:
            # Celery would stop the whole worker; a process that ran out is replaced instead
            os._exit(OUT_OF_MEMORY_EXIT)

    def limit_process(**_: object) -> None:
        prepare()
        limit_memory(limits.memory_bytes)

    worker_process_init.connect(limit_process, weak=False)


def run_tiles_job(job: TilesJob, store: BlobStore, ledger: WorkLedger) -> None:
    """One attempt. Harmless for a message that comes twice, too late, or for work that is done or doomed."""
    if store.exists(job.tiles_blob):
        ledger.announce(job.key)
        return
    token = uuid.uuid4().hex
    begun = ledger.begin(job.key, token, MAX_ATTEMPTS)
    if begun == "exhausted":
        error = processing_failed()
        ledger.fail(job.key, error.code, error.message)
        ledger.announce(job.key)
    if begun != "begun":
        return
    outcome: Outcome = "failed"
    try:
        with Heartbeat(ledger, job.key, token):
            outcome = _make_tiles(job, store, ledger)
    finally:
        ledger.end(job.key, token, outcome)


def _make_tiles(job: TilesJob, store: BlobStore, ledger: WorkLedger) -> Outcome:
    data = store.get(job.image_blob)
    if data is not None and hashlib.sha256(data).hexdigest() != job.digest:
        store.delete(job.image_blob)
        data = None
    if data is None:
        return "undone"  # whoever waits puts it there again
    limit_cpu(job.cpu_s)
    try:
        spec, limits = PreprocessSpec.from_json(job.spec), ImageLimits.from_json(job.limits)
        payload = to_bytes(preprocess(data, spec, limits, job.page))
    except ImageError as refused:
        ledger.fail(job.key, refused.code, refused.message)
        return "done"
    finally:
        unlimit_cpu()
    try:
        store.put(job.tiles_blob, payload, TILES_TTL_S)
    except BlobStoreFull:
        error = overloaded()
        ledger.fail(job.key, error.code, error.message)
    return "done"


class Heartbeat:
    """Renews a lease from a thread while the work's native code runs, and hears whether anybody waits."""

    def __init__(self, ledger: WorkLedger, key: str, token: str) -> None:
        self._ledger, self._key, self._token = ledger, key, token
        self._unwanted = 0  # beats in a row
        self._loop = LoopThread("the heartbeat of a lease", self._beat, AWAY, HEARTBEAT_S)

    def __enter__(self) -> Heartbeat:
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    @property
    def wanted(self) -> bool:
        """False once several beats in a row found no waiter: one may fall between a Redis that forgot
        and waiters who ask again."""
        return self._unwanted < UNWANTED_BEATS

    def _beat(self) -> None:
        self._loop.pause(HEARTBEAT_S)
        if not self._loop.is_closing:
            is_wanted = self._ledger.beat(self._key, self._token)
            self._unwanted = 0 if is_wanted else self._unwanted + 1
