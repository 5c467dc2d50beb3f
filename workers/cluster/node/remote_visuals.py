"""A node's part in visual tokens: tiles into the blob store, one encode for all machines, word to waiters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from celery import Celery
from kombu.exceptions import OperationalError

from llm.request import VisualKey
from workers.cluster import redis_client
from workers.cluster.blobs import BlobStore, BlobStoreFull, BlobStoreUnavailable
from workers.cluster.ledger import WorkLedger
from workers.cluster.members import About, Watch
from workers.cluster.names import (
    ENCODE_QUEUE,
    ENCODE_TASK,
    GRID_HEADER,
    ROWS_HEADER,
    TILES_TTL_S,
    EncodeJob,
    InboxMessage,
    Mailbox,
    encoder_tiles_blob,
    task_headers,
)
from workers.cluster.node.stored_tiles import StoredTiles
from workers.cluster.single_flight import Judged, Waiter, Waiters
from workers.contract.faults import ENCODING_FAILED
from workers.contract.loops import log_failure
from workers.contract.stages import StageUnavailable, overloaded
from workers.contract.tiles_handle import TilesHandle
from workers.contract.versions import version_of

log = logging.getLogger(__name__)

AWAY = (*redis_client.AWAY, BlobStoreUnavailable, OperationalError)
SEND_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}


def encode_timed_out() -> StageUnavailable:
    return StageUnavailable("encode_timeout", "The image was not encoded in time. Please try again.")


@dataclass(slots=True, eq=False)
class _TilesAtHand:
    """Tiles of an image that replicas wait for."""

    waiter: Waiter
    key: VisualKey
    tiles: TilesHandle
    patience_s: float
    at_work: float = field(default_factory=time.monotonic)  # when somebody was last seen at it
    stored: float = 0.0  # when the tiles were last put


class RemoteVisuals:
    """Single flight over all machines: a ledger lease while somebody encodes, taken over when it runs out."""

    def __init__(
        self,
        app: Celery,
        store_url: str,
        blobs: BlobStore,
        level2: BlobStore,
        ledger: WorkLedger,
        mailbox: Mailbox,
        replicas: Watch,
        encoders: Watch,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._app = app
        self._blobs = blobs
        self._level2 = level2
        self._store_url = store_url
        self._waiters = Waiters(ledger, store_url)
        self._clock = ledger.clock
        self._mailbox = mailbox
        self._replicas = replicas
        self._encoders = encoders
        self._threads = threads
        # replicas that wait, in order, and the rows that they expect
        self._wanted: dict[VisualKey, dict[str, int]] = {}

    def want(self, key: VisualKey, replica: str, num_rows: int) -> None:
        self._wanted.setdefault(key, {})[replica] = num_rows

    def unwant(self, key: VisualKey, replica: str) -> None:
        replicas = self._wanted.get(key, {})
        replicas.pop(replica, None)
        if not replicas:
            self._wanted.pop(key, None)

    def is_wanted(self, key: VisualKey, replica: str) -> bool:
        return replica in self._wanted.get(key, {})

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for key in list(self._wanted):
            self.unwant(key, replica)

    async def provide(self, key: VisualKey, tiles: TilesHandle, deadline_s: float) -> None:
        """Returns once every replica that waits has word that the tokens are there.

        An encode under way may take as long as it does: its lease ends with its worker. Raises
        StageUnavailable for what may do later: nobody was at it for `deadline_s`. Raises TilesLost.
        Cancelled: the encode is dropped if no one else waits.
        """
        flight = _TilesAtHand(Waiter(self._waiters), key, tiles, deadline_s)
        try:
            while self._wanted.get(key):
                if time.monotonic() > flight.at_work + flight.patience_s:
                    raise encode_timed_out()
                if not await self._advance(flight):
                    await flight.waiter.pause()
        finally:
            self._leave(flight)

    async def _run(self, function: Callable[..., object], *arguments: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _advance(self, flight: _TilesAtHand) -> bool:
        """True if some replicas got word; those that use another number format take their own turn."""
        forms: dict[str, list[str]] = {}
        for replica in self._wanted.get(flight.key, {}):
            about = self._replicas.alive.get(replica)
            if about is not None:
                forms.setdefault(str(about.get("dtype")), []).append(replica)
        told = False
        for dtype, replicas in forms.items():
            name = f"{flight.key}.{dtype}"
            flight.waiter.join(name)
            about = self._replicas.alive[replicas[0]]
            try:
                message = await self._run(self._look, flight, name, about, replicas)
            except AWAY as error:
                log.warning("Redis is away: %s", error)
                continue
            except BlobStoreFull:
                raise overloaded() from None
            if isinstance(message, InboxMessage):
                told = True
                for replica in replicas:
                    await self._tell(flight, replica, message)
        return told

    async def _tell(self, flight: _TilesAtHand, replica: str, message: InboxMessage) -> None:
        num_rows = self._num_rows(flight.key, replica)
        self.unwant(flight.key, replica)
        try:
            await self._run(self._post, replica, message)
        except AWAY:
            self.want(flight.key, replica, num_rows)

    def _num_rows(self, key: VisualKey, replica: str) -> int:
        return self._wanted.get(key, {}).get(replica, 0)

    def _look(
        self, flight: _TilesAtHand, name: str, about: About, replicas: list[str]
    ) -> InboxMessage | None:
        """What to tell the replicas, if it is settled; else gets the work done. Runs in a thread."""

        def find() -> InboxMessage | None:
            return InboxMessage("visual", flight.key) if self._level2.exists(name) else None

        def note_work() -> None:
            flight.at_work = time.monotonic()

        try:
            return flight.waiter.advance(
                name,
                find,
                lambda: self._send(flight, about, replicas[0]),
                ENCODING_FAILED,
                on_running=note_work,
            )
        except Judged as verdict:
            return InboxMessage("fail", flight.key, "", verdict.code, verdict.message)

    def _send(self, flight: _TilesAtHand, about: About, replica: str) -> None:
        blob, grid = self._store(flight), flight.tiles.grid.numbers
        revision, dtype = about.get("encoder_revision", ""), about.get("dtype", "")
        if not any(
            (encoder.get("revision"), encoder.get("dtype")) == (revision, dtype)
            for encoder in self._encoders.alive.values()
        ):
            self._post(replica, InboxMessage("tiles", flight.key, blob, grid=grid))
            return
        left_s = flight.at_work + flight.patience_s - time.monotonic()
        job = EncodeJob(flight.key, revision, dtype, blob, left_s, self._clock.now())
        self._app.send_task(
            ENCODE_TASK,
            kwargs=asdict(job),
            queue=ENCODE_QUEUE,
            headers=task_headers(
                job.sent_at, **{ROWS_HEADER: self._num_rows(flight.key, replica), GRID_HEADER: grid}
            ),
            retry=True,
            retry_policy=SEND_RETRY,
        )

    def _store(self, flight: _TilesAtHand) -> str:
        """The blob that has the tiles for some time from now: that of the worker which made them, if it uses
        this store."""
        tiles = flight.tiles
        if isinstance(tiles, StoredTiles) and tiles.url == self._store_url:
            tiles.renew()
            return tiles.blob
        blob = encoder_tiles_blob(flight.key)
        if time.monotonic() - flight.stored > TILES_TTL_S / 2 or not self._blobs.exists(blob):
            self._blobs.put(blob, tiles.wire(), TILES_TTL_S)
            flight.stored = time.monotonic()
        return blob

    def _post(self, replica: str, message: InboxMessage) -> None:
        self._mailbox.post(replica, message, version_of(self._replicas.alive.get(replica, {})))

    def _leave(self, flight: _TilesAtHand) -> None:
        """The last to leave takes the tiles along; if Redis is away they expire."""
        flight.waiter.leave()

        def leave() -> None:
            with contextlib.suppress(*AWAY):
                if flight.waiter.leave_ledger() and flight.stored:
                    self._blobs.delete(encoder_tiles_blob(flight.key))

        self._threads.submit(leave).add_done_callback(log_failure)

    async def listen(self) -> None:
        """Wakes those who wait for an encode at announcements, for ever."""
        await self._waiters.listen()
