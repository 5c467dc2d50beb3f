"""The Celery twin of the preprocess stage: workers anywhere, images and tiles through the blob store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from kombu.exceptions import OperationalError

from llm.request import Priority
from preprocess.limits import ImageLimits
from preprocess.probe import open_header, page_digest
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.types import ImageError, TileGrid, Tiles
from preprocess.wire import from_bytes
from workers.cluster.announcements import listen
from workers.cluster.blobs import BlobStoreFull, BlobStoreUnavailable, open_store
from workers.cluster.celery_app import BATCH_PRIORITY, PREPROCESS_QUEUE, TILES_TASK, make_app
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import TilesJob, task_headers
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import AWAY, connect
from workers.cluster.redis_clock import RedisClock
from workers.contract.loops import log_failure
from workers.contract.stages import (
    MAX_ATTEMPTS,
    DecodeLimits,
    Urgency,
    deadline_passed,
    overloaded,
    processing_failed,
    unreachable,
)
from workers.contract.streams import end_tasks
from workers.contract.turns import AGEING_S

log = logging.getLogger(__name__)

_POLL_S = 0.5  # how soon a lost announcement or a lost lease is noticed
_IMAGE_TTL_MARGIN_S = 30.0
_THREADS = 8
_AWAY = (*AWAY, BlobStoreUnavailable, OperationalError)


class CeleryPreprocess:
    """`PreprocessStage` over the queue `preprocess`.

    A waiter asks the ledger, sends the message if nobody has, and sends it again when a worker's heartbeat
    stops. Announcements only make it ask sooner, so losing one costs no more than _POLL_S.
    """

    def __init__(self, broker: str, store: str, limits: DecodeLimits | None = None) -> None:
        """Raises ValueError for URLs that aren't Redis's; connects to nothing yet."""
        self._limits = limits or DecodeLimits()
        self._app = make_app(broker)
        self._store = open_store(store)
        self._store_url = store
        self._ledger_client = connect(store)
        self._ledger = WorkLedger(self._ledger_client, PREPROCESS_QUEUE)
        self._clock = RedisClock(self._ledger_client)
        self._broker_client = connect(broker)
        self._stats = QueueStats(self._broker_client, self._ledger_client)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="preprocess")
        self._wakers: dict[str, set[asyncio.Event]] = {}
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._listener = asyncio.create_task(listen(self._store_url, self._ledger.channel, self._wake))

    async def close(self) -> None:
        if self._listener is not None:
            await end_tasks(self._listener)
        await asyncio.to_thread(self._threads.shutdown)
        self._store.close()
        self._ledger_client.close()
        self._broker_client.close()
        self._app.close()

    async def tiles(
        self,
        data: bytes,
        spec: PreprocessSpec,
        limits: ImageLimits,
        *,
        deadline_s: float,
        page: int = 0,
        urgency: Urgency | None = None,
    ) -> Tiles:
        header = open_header(data, limits, page)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        job = TilesJob(
            key=tiles_key(page_digest(digest, page), spec),
            digest=digest,
            spec=spec.to_json(),
            limits=limits.to_json(),
            page=page,
            cpu_s=self._limits.cpu_within(deadline_s),
        )
        grid = spec.rule.grid(header.width, header.height, spec.detail)
        waiter = _Waiter(job, data, grid, deadline_s, urgency or Urgency())
        wakers = self._wakers.setdefault(job.key, set())
        wakers.add(waiter.woken)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._wait(waiter)
        except TimeoutError:
            raise (unreachable() if waiter.away else deadline_passed()) from None
        finally:
            wakers.discard(waiter.woken)
            if not wakers and self._wakers.get(job.key) is wakers:
                del self._wakers[job.key]
            self._threads.submit(self._leave, waiter).add_done_callback(log_failure)

    async def queues(self) -> dict[str, dict[str, float]]:
        """As `QueueStats.read`, of the preprocess queue alone. Empty while Redis is away."""
        loop = asyncio.get_running_loop()
        try:
            queues = await loop.run_in_executor(self._threads, self._stats.read)
        except _AWAY:
            return {}
        return {PREPROCESS_QUEUE: queues[PREPROCESS_QUEUE]}

    async def _wait(self, waiter: _Waiter) -> Tiles:
        loop = asyncio.get_running_loop()
        while True:
            waiter.woken.clear()
            try:
                tiles = await loop.run_in_executor(self._threads, self._advance, waiter)
                waiter.away = False
            except _AWAY as error:
                if not waiter.away:
                    log.warning("Redis is away: %s", error)
                tiles = None
                waiter.away = True
            except BlobStoreFull:
                raise overloaded() from None
            if tiles is not None:
                return tiles
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await waiter.woken.wait()

    def _advance(self, waiter: _Waiter) -> Tiles | None:
        """The tiles, if they are there; else whatever gets them made. Runs in a thread.

        The lease is read before the tiles: a worker puts the tiles before it ends its lease.
        """
        job = waiter.job
        state = self._ledger.look(job.key, waiter.id)
        if state.verdict is not None:
            full = overloaded()
            raise full if state.verdict[0] == full.code else ImageError(*state.verdict)
        if state.running:
            return None
        payload = self._store.get(job.tiles_blob)
        if payload is not None:
            try:
                return from_bytes(payload, waiter.grid)
            except ValueError as misfit:
                log.warning("the tiles stored for an image are not its own: %s", misfit)
                self._store.delete(job.tiles_blob)
                waiter.misfits += 1
            if waiter.misfits >= MAX_ATTEMPTS:
                raise unreachable()
        if state.attempts >= MAX_ATTEMPTS:
            error = processing_failed()
            self._ledger.fail(job.key, error.code, error.message)
            self._ledger.announce(job.key)
            raise error
        priority = waiter.priority
        if self._ledger.claim(job.key, priority):
            try:
                self._send(waiter, priority)
            except BaseException:
                self._ledger.unclaim(job.key)
                raise
        return None

    def _send(self, waiter: _Waiter, priority: Priority) -> None:
        job = waiter.job
        self._store.put(job.image_blob, waiter.data, waiter.deadline_s + _IMAGE_TTL_MARGIN_S)
        self._app.send_task(
            TILES_TASK,
            kwargs=job.to_json(),
            queue=PREPROCESS_QUEUE,
            headers=task_headers(self._clock.now()),
            priority=BATCH_PRIORITY if priority == "batch" else 0,
            time_limit=max(2.0, waiter.deadline_s / 2),
            retry=True,
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        )

    def _leave(self, waiter: _Waiter) -> None:
        """The last to leave takes image and tiles along; if Redis is away they expire."""
        if waiter.away:
            return
        with contextlib.suppress(*_AWAY):
            if self._ledger.leave(waiter.job.key, waiter.id) == 0:
                self._store.delete(waiter.job.tiles_blob)
                self._store.delete(waiter.job.image_blob)

    def _wake(self, key: str) -> None:
        for event in self._wakers.get(key, ()):
            event.set()


class _Waiter:
    def __init__(
        self, job: TilesJob, data: bytes, grid: TileGrid, deadline_s: float, urgency: Urgency
    ) -> None:
        self.id = uuid.uuid4().hex
        self.job = job
        self.data = data
        self.grid = grid  # as planned
        self.misfits = 0  # tiles found that were damaged or of another grid
        self.deadline_s = deadline_s
        self.urgency = urgency
        self.woken = asyncio.Event()
        self.away = False  # Redis did not answer last time
        self._since = time.monotonic()

    @property
    def priority(self) -> Priority:
        """In the queue: batch work that has waited `AGEING_S`, or that an interactive request joined, is sent
        once more, among the interactive messages."""
        waited = time.monotonic() - self._since >= AGEING_S
        return "interactive" if waited else self.urgency.priority
