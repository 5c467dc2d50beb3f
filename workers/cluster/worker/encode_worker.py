"""`vlm worker encode`: a Celery thread pool whose tasks share one batcher, so that tiles batch together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import redis
from celery.signals import worker_shutting_down

from encoder.batcher import StepResult, TileBatcher
from preprocess.types import Tiles
from preprocess.wire import from_bytes
from workers.cluster.blobs import BlobStore, BlobStoreFull, open_store
from workers.cluster.celery_app import default_name, make_app, thread_worker
from workers.cluster.ledger import Outcome, WorkLedger
from workers.cluster.members import About, HeartbeatThread, Registry
from workers.cluster.names import (
    ENCODE_QUEUE,
    ENCODE_TASK,
    ENCODER,
    GRID_HEADER,
    ROWS_HEADER,
    EncodeJob,
    planned_grid,
    waited_s,
)
from workers.cluster.redis_client import check_access, connect
from workers.cluster.single_flight import Lease
from workers.cluster.visual_store import VisualStore, open_visual_blobs
from workers.contract.faults import ENCODING_FAILED
from workers.contract.stages import overloaded
from workers.contract.versions import MESSAGE_VERSION, known_fields
from workers.contract.visual_format import VisualFormat
from workers.local.progress import STALL_S, Progress
from workers.local.step_thread import StepThread

CONCURRENCY = 32
_PATIENCE_S = 60.0
_WANTED_S = 0.5  # how soon it is noticed that no request waits any more


class EncodeFailed(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Unwanted(Exception):
    """No request waits for these visual tokens any more."""


class _SteppedBatcher:
    """`TileBatcher` as `Stepped`, with those who wait for its keys."""

    def __init__(self, batcher: TileBatcher) -> None:
        self.batcher = batcher
        self._waiters: dict[str, list[Future[Any]]] = {}

    @property
    def has_work(self) -> bool:
        return self.batcher.due_in() == 0.0

    def step(self) -> StepResult:
        return self.batcher.step()

    def add(self, key: str, tiles: Tiles, future: Future[Any]) -> None:
        self._waiters.setdefault(key, []).append(future)
        self.batcher.cache.hold(key)
        self.batcher.put_tiles(key, tiles.pixels, grid=tiles.grid)
        self._settle(key)

    def give_up(self, key: str, future: Future[Any]) -> None:
        if future in self._waiters.get(key, ()):
            self._waiters[key].remove(future)
            self.batcher.cache.release(key)

    def after_step(self, result: StepResult) -> None:
        for key in [*result.finished, *(key for key, _ in result.failures)]:
            self._settle(key)

    def _settle(self, key: str) -> None:
        rows, failure = self.batcher.cache.get(key), self.batcher.failed(key)
        if rows is None and failure is None:
            return
        for future in self._waiters.pop(key, []):
            if rows is not None:
                future.set_result(rows)
            elif failure is not None:
                future.set_exception(EncodeFailed(*failure))
            self.batcher.cache.release(key)


class EncodeService:
    """One encoder for many threads."""

    def __init__(
        self,
        make_batcher: Callable[[Progress], TileBatcher],
        on_crash: Callable[[], None],
        stall_s: float = STALL_S,
    ) -> None:
        """on_crash: the encoder is beyond repair, or hangs: it made no progress for `stall_s`."""
        self._thread: StepThread[_SteppedBatcher, StepResult] = StepThread(
            lambda progress: _SteppedBatcher(make_batcher(progress)),
            lambda stepped, result: stepped.after_step(result),
            on_crash,
            stall_s=stall_s,
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def encode(self, key: str, tiles: Tiles, wanted: Callable[[], bool] = lambda: True) -> Any:
        """Visual tokens [n, width] of an image's tiles, however long they take.

        Raises EncodeFailed, and Unwanted once `wanted` says no.
        """
        future: Future[Any] = Future()
        self._thread.tell(lambda stepped: stepped.add(key, tiles, future))
        while True:
            try:
                return future.result(_WANTED_S)
            except TimeoutError:
                if not wanted():
                    self._thread.tell(lambda stepped: stepped.give_up(key, future))
                    raise Unwanted from None


def run_encode_job(
    job: EncodeJob,
    service: EncodeService,
    blobs: BlobStore,
    level2: VisualStore,
    ledger: WorkLedger,
    headers: Mapping[str, Any],
) -> None:
    """One attempt, for as long as somebody waits. Harmless for a message that comes twice, too late, or for
    work that is done or doomed."""
    if waited_s(headers, ledger.clock) >= job.deadline_s:
        return
    if (job.revision, job.dtype) != (level2.form.revision, level2.form.dtype):
        ledger.unclaim(f"{job.key}.{job.dtype}")  # sent again, for a worker with that encoder
        return
    name = level2.form.entry(job.key)
    if level2.has(job.key):
        ledger.announce(name)
        return
    lease = Lease.take(ledger, name, ENCODING_FAILED)
    if lease is not None:
        with lease:
            lease.outcome = _encode(job, service, blobs, level2, lease, headers)


def _encode(
    job: EncodeJob,
    service: EncodeService,
    blobs: BlobStore,
    level2: VisualStore,
    lease: Lease,
    headers: Mapping[str, Any],
) -> Outcome:
    payload = blobs.get(job.tiles_blob)
    if payload is None:
        return "undone"  # whoever waits puts it there again
    try:
        tiles = from_bytes(payload, planned_grid(headers.get(GRID_HEADER, ())))
        rows = service.encode(job.key, tiles, lambda: lease.wanted)
        if headers.get(ROWS_HEADER, 0) not in (0, len(rows)):
            raise ValueError("tiles of another grid")
        level2.put(job.key, rows)
    except ValueError:
        blobs.delete(job.tiles_blob)
        return "failed"
    except EncodeFailed:
        lease.judge(*ENCODING_FAILED)
    except Unwanted:
        return "undone"
    except BlobStoreFull:
        full = overloaded()
        lease.judge(full.code, full.message)
    return "done"


def run(
    broker: str,
    store: str,
    make_batcher: Callable[[Progress], TileBatcher],
    form: VisualFormat,
    concurrency: int = CONCURRENCY,
    stall_s: float = STALL_S,
) -> None:
    """Serves until SIGTERM (finishes what it has) or SIGINT; ends with 1 when the encoder crashes or makes no
    progress for `stall_s`. Raises ValueError for a Redis of no use."""
    check_access(broker=broker, store=store)
    app = make_app(broker)
    client = connect(store, _PATIENCE_S)
    blobs, ledger = open_store(store, patience_s=_PATIENCE_S), WorkLedger(client, ENCODE_QUEUE)
    level2 = VisualStore(open_visual_blobs(store, patience_s=_PATIENCE_S), form)
    service = EncodeService(make_batcher, on_crash=lambda: os._exit(1), stall_s=stall_s)
    draining = threading.Event()
    name = default_name()

    @app.task(name=ENCODE_TASK, bind=True)
    def encode(task: Any, **message: Any) -> None:
        headers = task.request.headers or {}
        with contextlib.suppress(redis.RedisError):
            ledger.note_wait(waited_s(headers, ledger.clock))
        job = EncodeJob(**known_fields(EncodeJob, message))
        run_encode_job(job, service, blobs, level2, ledger, headers)

    def about() -> About | None:
        if draining.is_set():
            return None
        return {
            "version": MESSAGE_VERSION,
            "revision": form.revision,
            "dtype": form.dtype,
            "width": form.width,
        }

    def drain(**_: object) -> None:
        draining.set()

    worker_shutting_down.connect(drain, weak=False)
    worker = thread_worker(app, ENCODE_QUEUE, concurrency, f"encode-{name}")
    service.start()
    heartbeat = HeartbeatThread(Registry(connect(store), ENCODER), name, about)
    heartbeat.start()
    try:
        worker.start()
    finally:
        heartbeat.close()
        service.close()
