"""A node's part in visual tokens: tiles into the blob store, one encode for all machines, word to waiters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from celery import Celery
from kombu.exceptions import OperationalError

from llm.request import VisualKey
from workers.cluster import redis_client
from workers.cluster.announcements import listen
from workers.cluster.blobs import BlobStore, BlobStoreFull, BlobStoreUnavailable
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import (
    ENCODE_QUEUE,
    ENCODE_TASK,
    ROWS_HEADER,
    TILES_TTL_S,
    EncodeJob,
    InboxMessage,
    Mailbox,
    encoder_tiles_blob,
    task_headers,
)
from workers.cluster.registry import About, Watch
from workers.contract.faults import ENCODING_FAILED
from workers.contract.loops import log_failure
from workers.contract.stages import MAX_ATTEMPTS, StageUnavailable, overloaded
from workers.contract.versions import version_of

log = logging.getLogger(__name__)

AWAY = (*redis_client.AWAY, BlobStoreUnavailable, OperationalError)
SEND_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
_POLL_S = 0.5  # how soon a lost announcement or a lost lease is noticed


def encode_timed_out() -> StageUnavailable:
    return StageUnavailable("encode_timeout", "The image was not encoded in time. Please try again.")


@dataclass(slots=True, eq=False)
class _Flight:
    key: VisualKey
    tiles: bytes
    patience_s: float
    at_work: float = field(default_factory=time.monotonic)  # when somebody was last seen at it
    waiter: str = field(default_factory=lambda: uuid.uuid4().hex)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
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
        self._store_url = store_url
        self._blobs = blobs
        self._level2 = level2
        self._ledger = ledger
        self._mailbox = mailbox
        self._replicas = replicas
        self._encoders = encoders
        self._threads = threads
        # replicas that wait, in order, and the rows that they expect
        self._wanted: dict[VisualKey, dict[str, int]] = {}
        self._flights: dict[str, set[_Flight]] = {}  # by entry name

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

    async def provide(self, key: VisualKey, tiles: bytes, deadline_s: float) -> None:
        """Returns once every replica that waits has word that the tokens are there.

        An encode under way may take as long as it does: its lease ends with its worker. Raises
        StageUnavailable for what may do later: nobody was at it for `deadline_s`. Cancelled: the encode is
        dropped if no one else waits.
        """
        flight = _Flight(key, tiles, deadline_s)
        try:
            while self._wanted.get(key):
                if time.monotonic() > flight.at_work + flight.patience_s:
                    raise encode_timed_out()
                flight.woken.clear()
                settled = await self._advance(flight)
                if not settled:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await flight.woken.wait()
        finally:
            self._leave(flight)

    async def _run(self, function: Callable[..., object], *arguments: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _advance(self, flight: _Flight) -> bool:
        """True if some replicas got word; those that use another number format take their own turn."""
        forms: dict[str, list[str]] = {}
        for replica in self._wanted.get(flight.key, {}):
            about = self._replicas.alive.get(replica)
            if about is not None:
                forms.setdefault(str(about.get("dtype")), []).append(replica)
        told = False
        for dtype, replicas in forms.items():
            name = f"{flight.key}.{dtype}"
            self._flights.setdefault(name, set()).add(flight)
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

    async def _tell(self, flight: _Flight, replica: str, message: InboxMessage) -> None:
        num_rows = self._num_rows(flight.key, replica)
        self.unwant(flight.key, replica)
        try:
            await self._run(self._post, replica, message)
        except AWAY:
            self.want(flight.key, replica, num_rows)

    def _num_rows(self, key: VisualKey, replica: str) -> int:
        return self._wanted.get(key, {}).get(replica, 0)

    def _look(self, flight: _Flight, name: str, about: About, replicas: list[str]) -> InboxMessage | None:
        """What to tell the replicas, if it is settled; else gets the work done. Runs in a thread.

        The lease is read before level 2: whoever encodes writes there before the lease ends.
        """
        state = self._ledger.look(name, flight.waiter)
        if state.verdict is not None:
            self._ledger.leave(name, flight.waiter)  # a replica that wants the key from now on waits anew
            return InboxMessage("fail", flight.key, "", *state.verdict)
        if state.running:
            flight.at_work = time.monotonic()
            return None
        if self._level2.exists(name):
            return InboxMessage("visual", flight.key)
        if state.attempts >= MAX_ATTEMPTS:
            self._ledger.fail(name, *ENCODING_FAILED)
            self._ledger.announce(name)
            self._ledger.leave(name, flight.waiter)
            return InboxMessage("fail", flight.key, "", *ENCODING_FAILED)
        if self._ledger.claim(name):
            try:
                self._send(flight, about, replicas[0])
            except BaseException:
                self._ledger.unclaim(name)
                raise
        return None

    def _send(self, flight: _Flight, about: About, replica: str) -> None:
        blob = encoder_tiles_blob(flight.key)
        if time.monotonic() - flight.stored > TILES_TTL_S / 2 or not self._blobs.exists(blob):
            self._blobs.put(blob, flight.tiles, TILES_TTL_S)
            flight.stored = time.monotonic()
        revision, dtype = about.get("encoder_revision", ""), about.get("dtype", "")
        if not any(
            (encoder.get("revision"), encoder.get("dtype")) == (revision, dtype)
            for encoder in self._encoders.alive.values()
        ):
            self._post(replica, InboxMessage("tiles", flight.key, blob))
            return
        left_s = flight.at_work + flight.patience_s - time.monotonic()
        job = EncodeJob(flight.key, revision, dtype, blob, left_s, self._ledger.clock.now())
        self._app.send_task(
            ENCODE_TASK,
            kwargs=asdict(job),
            queue=ENCODE_QUEUE,
            headers=task_headers(job.sent_at, **{ROWS_HEADER: self._num_rows(flight.key, replica)}),
            retry=True,
            retry_policy=SEND_RETRY,
        )

    def _post(self, replica: str, message: InboxMessage) -> None:
        self._mailbox.post(replica, message, version_of(self._replicas.alive.get(replica, {})))

    def _leave(self, flight: _Flight) -> None:
        """The last to leave takes the tiles along; if Redis is away they expire."""
        names = [name for name, flights in self._flights.items() if flight in flights]
        for name in names:
            self._flights[name].discard(flight)
            if not self._flights[name]:
                del self._flights[name]

        def leave() -> None:
            with contextlib.suppress(*AWAY):
                left = [self._ledger.leave(name, flight.waiter) for name in names]
                if not any(left):
                    self._blobs.delete(encoder_tiles_blob(flight.key))

        if names:
            self._threads.submit(leave).add_done_callback(log_failure)

    async def listen(self) -> None:
        """Wakes flights at announcements, for ever; without a connection they poll."""
        await listen(self._store_url, self._ledger.channel, self._wake)

    def _wake(self, name: str) -> None:
        for flight in self._flights.get(name, ()):
            flight.woken.set()
