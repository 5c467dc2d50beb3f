"""The tasks of a preprocess worker. Never imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init
from redis import RedisError

from preprocess.formats.libtiff import prepare
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.types import ImageError
from preprocess.wire import to_bytes
from workers.children.process_limits import OUT_OF_MEMORY_EXIT, limit_cpu, limit_memory, unlimit_cpu
from workers.cluster.blobs import BlobStore, BlobStoreFull
from workers.cluster.celery_app import TILES_TASK
from workers.cluster.ledger import Outcome, WorkLedger
from workers.cluster.names import TILES_TTL_S, TilesJob, waited_s
from workers.cluster.single_flight import Lease
from workers.contract.stages import DecodeLimits, overloaded, processing_failed
from workers.contract.versions import known_fields


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
        limit_memory(spare_bytes=limits.memory_bytes)

    worker_process_init.connect(limit_process, weak=False)


def run_tiles_job(job: TilesJob, store: BlobStore, ledger: WorkLedger) -> None:
    """One attempt. Harmless for a message that comes twice, too late, or for work that is done or doomed."""
    if store.exists(job.tiles_blob):
        ledger.announce(job.key)
        return
    exhausted = processing_failed()
    lease = Lease.take(ledger, job.key, (exhausted.code, exhausted.message))
    if lease is not None:
        with lease:
            lease.outcome = _make_tiles(job, store, lease)


def _make_tiles(job: TilesJob, store: BlobStore, lease: Lease) -> Outcome:
    data = store.get(job.image_blob)
    if data is not None and hashlib.sha256(data).hexdigest() != job.digest:
        store.delete(job.image_blob)
        data = None
    if data is None:
        return "undone"  # whoever waits puts it there again
    limit_cpu(job.cpu_s)
    try:
        spec, limits = PreprocessSpec.from_json(job.spec), ImageLimits.from_json(job.limits)
        payload = to_bytes(preprocess(data, spec, limits))
    except ImageError as refused:
        lease.judge(refused.code, refused.message)
        return "done"
    finally:
        unlimit_cpu()
    try:
        store.put(job.tiles_blob, payload, TILES_TTL_S)
    except BlobStoreFull:
        full = overloaded()
        lease.judge(full.code, full.message)
    return "done"
