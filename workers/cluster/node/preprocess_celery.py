"""The Celery twin of the preprocess stage: workers anywhere, images and tiles through the blob store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from kombu.exceptions import OperationalError

from llm.request import Priority
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.types import ImageError, ImageInfo
from workers.cluster.blobs import BlobStoreFull, BlobStoreUnavailable, open_store
from workers.cluster.celery_app import BATCH_PRIORITY, PREPROCESS_QUEUE, TILES_TASK, make_app
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import TILES_TTL_S, TilesJob, task_headers
from workers.cluster.node.stored_tiles import StoredTiles
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import AWAY, connect
from workers.cluster.redis_clock import RedisClock
from workers.cluster.single_flight import Judged, Waiter, Waiters
from workers.contract.loops import log_failure
from workers.contract.stages import (
    DecodeLimits,
    Urgency,
    deadline_passed,
    overloaded,
    processing_failed,
    unreachable,
)
from workers.contract.streams import end_tasks
from workers.contract.tiles_handle import TilesHandle
from workers.contract.turns import AGEING_S

log = logging.getLogger(__name__)

_IMAGE_TTL_MARGIN_S = 30.0
_THREADS = 8
_AWAY = (*AWAY, BlobStoreUnavailable, OperationalError)


class CeleryPreprocess:
    """`PreprocessStage` over the queue `preprocess`.

    The tiles of an image are made once, however many nodes wait for them: `workers.cluster.single_flight`.
    """

    def __init__(self, broker: str, store: str, limits: DecodeLimits | None = None) -> None:
        """Raises ValueError for URLs that aren't Redis's; connects to nothing yet."""
        self._limits = limits or DecodeLimits()
        self._app = make_app(broker)
        self._url = store
        self._store = open_store(store)
        self._ledger_client = connect(store)
        self._waiters = Waiters(WorkLedger(self._ledger_client, PREPROCESS_QUEUE), store)
        self._clock = RedisClock(self._ledger_client)
        self._broker_client = connect(broker)
        self._stats = QueueStats(self._broker_client, self._ledger_client)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="preprocess")
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._listener = asyncio.create_task(self._waiters.listen())

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
        info: ImageInfo,
        spec: PreprocessSpec,
        limits: ImageLimits,
        *,
        deadline_s: float,
        urgency: Urgency | None = None,
    ) -> TilesHandle:
        job = TilesJob(
            key=tiles_key(info.sha256, spec),
            digest=info.sha256,
            spec=spec.to_json(),
            limits=limits.to_json(),
            cpu_s=self._limits.cpu_within(deadline_s),
        )
        wish = _Wish(Waiter(self._waiters), job, data, deadline_s, urgency or Urgency())
        wish.waiter.join(job.key)
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait(wish)
        except BaseException as error:
            self._leave(wish)
            if isinstance(error, TimeoutError):
                raise (unreachable() if wish.away else deadline_passed()) from None
            raise
        finally:
            wish.waiter.leave()
        grid = spec.rule.grid(info.width, info.height, spec.detail)
        return StoredTiles(self._store, self._url, job.tiles_blob, grid, lambda: self._leave(wish))

    async def queues(self) -> dict[str, dict[str, float]]:
        """As `QueueStats.read`, of the preprocess queue alone. Empty while Redis is away."""
        loop = asyncio.get_running_loop()
        try:
            queues = await loop.run_in_executor(self._threads, self._stats.read)
        except _AWAY:
            return {}
        return {PREPROCESS_QUEUE: queues[PREPROCESS_QUEUE]}

    async def _wait(self, wish: _Wish) -> None:
        """Until the store has the tiles."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                is_there = await loop.run_in_executor(self._threads, self._advance, wish)
                wish.away = False
            except _AWAY as error:
                if not wish.away:
                    log.warning("Redis is away: %s", error)
                is_there = False
                wish.away = True
            except BlobStoreFull:
                raise overloaded() from None
            if is_there:
                return
            await wish.waiter.pause()

    def _advance(self, wish: _Wish) -> bool:
        """Whether the tiles are there; if not, whatever gets them made. Runs in a thread."""
        priority, exhausted = wish.priority, processing_failed()
        try:
            found = wish.waiter.advance(
                wish.job.key,
                lambda: self._store.renew(wish.job.tiles_blob, TILES_TTL_S) or None,
                lambda: self._send(wish, priority),
                (exhausted.code, exhausted.message),
                priority=priority,
            )
            return found is not None
        except Judged as verdict:
            full = overloaded()
            raise full if verdict.code == full.code else ImageError(verdict.code, verdict.message) from None

    def _send(self, wish: _Wish, priority: Priority) -> None:
        job = wish.job
        self._store.put(job.image_blob, wish.data, wish.deadline_s + _IMAGE_TTL_MARGIN_S)
        self._app.send_task(
            TILES_TASK,
            kwargs=job.to_json(),
            queue=PREPROCESS_QUEUE,
            headers=task_headers(self._clock.now()),
            priority=BATCH_PRIORITY if priority == "batch" else 0,
            time_limit=max(2.0, wish.deadline_s / 2),
            retry=True,
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        )

    def _leave(self, wish: _Wish) -> None:
        with contextlib.suppress(RuntimeError):  # the stage is closed: they expire
            self._threads.submit(self._leave_now, wish).add_done_callback(log_failure)

    def _leave_now(self, wish: _Wish) -> None:
        """The last to leave takes image and tiles along; if Redis is away they expire."""
        if wish.away:
            return
        with contextlib.suppress(*_AWAY):
            if wish.waiter.leave_ledger():
                self._store.delete(wish.job.tiles_blob)
                self._store.delete(wish.job.image_blob)


class _Wish:
    """For the tiles of one image."""

    def __init__(
        self,
        waiter: Waiter,
        job: TilesJob,
        data: bytes,
        deadline_s: float,
        urgency: Urgency,
    ) -> None:
        self.waiter = waiter
        self.job = job
        self.data = data
        self.deadline_s = deadline_s
        self.urgency = urgency
        self.away = False  # Redis did not answer last time
        self._since = time.monotonic()

    @property
    def priority(self) -> Priority:
        """In the queue: batch work that has waited `AGEING_S`, or that an interactive request joined, is sent
        once more, among the interactive messages."""
        waited = time.monotonic() - self._since >= AGEING_S
        return "interactive" if waited else self.urgency.priority
