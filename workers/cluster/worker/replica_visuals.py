"""Where a replica's visual tokens come from once its own cache has missed.

want -> level 2 (a hit fills the cache, nobody is asked) -> the request's node is asked for the image; what
comes back is either "level 2 has it now", or the tiles, to encode here because there is no encode worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import redis

from llm.request import Request, VisualKey, WantVisual
from preprocess.wire import from_bytes
from workers.cluster.blobs import BlobStore, BlobStoreFull, BlobStoreUnavailable
from workers.cluster.ledger import Outcome, WorkLedger
from workers.cluster.names import InboxMessage, planned_grid
from workers.cluster.single_flight import Lease
from workers.cluster.visual_store import VisualStore
from workers.contract.faults import ENCODING_FAILED
from workers.contract.stages import overloaded
from workers.local.engine_runner import EngineRunner
from workers.local.step_thread import StepThread

log = logging.getLogger(__name__)

_THREADS = 4
_LOOK_AGAIN_S = 2.0  # how soon a lost message is noticed
_MAX_ASKS = 3  # of one call for one key


@dataclass(frozen=True, slots=True)
class _Encode:
    """Tiles that are encoded here under a lease."""

    lease: Lease
    num_rows: int  # as planned
    blob: str


@dataclass(slots=True)
class _Want:
    """A key that calls of this replica wait for."""

    num_rows: int
    calls: list[str] = field(default_factory=list)
    asks: int = 0
    since: float = 0.0


class ReplicaVisuals:
    """Thread-safe. The runner itself is only touched on its own thread."""

    def __init__(
        self,
        thread: StepThread[EngineRunner, Any],
        level2: VisualStore,
        blobs: BlobStore,
        ledger: WorkLedger,
        ask: Callable[[WantVisual], None],
    ) -> None:
        """ask: sends a wish to the node of its request."""
        self._thread = thread
        self._level2 = level2
        self._blobs = blobs
        self._ledger = ledger
        self._ask = ask
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="visuals")
        self._lock = threading.Lock()
        self._wants: dict[VisualKey, _Want] = {}
        self._encoding: dict[VisualKey, _Encode] = {}
        self.level2_hits = 0
        self.level2_misses = 0

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def want(self, event: WantVisual, request: Request) -> None:
        """A request lacks a key; on the runner's thread."""
        key = event.key
        num_rows = request.prompt.planned_rows()[key]
        with self._lock:
            want = self._wants.setdefault(key, _Want(num_rows))
            want.calls.append(event.request_id)
            want.since = time.monotonic()
        self._pool.submit(self._guard, self._look, key, event.request_id)

    def forget_call(self, call: str) -> None:
        with self._lock:
            for key, want in list(self._wants.items()):
                if call in want.calls:
                    want.calls.remove(call)
                if not want.calls:
                    del self._wants[key]

    def take(self, message: InboxMessage) -> None:
        """`visual`, `tiles` or `fail` from a node."""
        key = VisualKey(message.key)
        if message.op == "visual":
            self._pool.submit(self._guard, self._look, key, None)
        elif message.op == "tiles":
            self._pool.submit(self._guard, self._encode_here, key, message)
        else:
            self._settle(key)
            self._thread.tell(lambda runner: runner.fail_tiles(key, message.code, message.message))

    def look_again(self) -> None:
        """Finds what was announced by a message that got lost; once a second or so."""
        late = time.monotonic() - _LOOK_AGAIN_S
        with self._lock:
            keys = [key for key, want in self._wants.items() if want.since < late]
            for key in keys:
                self._wants[key].since = time.monotonic()
        for key in keys:
            self._pool.submit(self._guard, self._look_if_there, key)

    def after_step(self, runner: EngineRunner) -> None:
        """Notes what was encoded here, or is wanted no more; on the runner's thread."""
        for key, encode in list(self._encoding.items()):
            rows, failure = runner.visual(key), runner.visual_failed(key)
            if rows is None and failure is None and runner.encoding(key) and runner.wanted(key):
                continue
            del self._encoding[key]
            self._pool.submit(self._guard, self._share, key, encode, rows, failure)

    def _guard(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except (redis.RedisError, BlobStoreUnavailable, OSError) as error:
            log.warning("Redis is away: %s", error)
        except Exception:
            log.exception("visual tokens could not be handled")

    def _settle(self, key: VisualKey) -> None:
        with self._lock:
            self._wants.pop(key, None)

    def _look(self, key: VisualKey, call: str | None) -> None:
        """Level 2, else the node of `call` or of any call that waits."""
        with self._lock:
            want = self._wants.get(key)
        if want is None:
            return
        try:
            rows = self._level2.get(key, want.num_rows)
        except BlobStoreUnavailable:
            rows = None
        if rows is None:
            self.level2_misses += 1
            self._ask_for(key, call)
            return
        self.level2_hits += 1
        self._settle(key)
        self._thread.tell(lambda runner: runner.put_visual(key, rows))

    def _look_if_there(self, key: VisualKey) -> None:
        if self._level2.has(key):
            self._look(key, None)

    def _ask_for(self, key: VisualKey, call: str | None) -> None:
        with self._lock:
            want = self._wants.get(key)
            if want is None or not want.calls:
                return
            if call is None:  # it was said to be there and is not
                want.asks += 1
                call = want.calls[0]
            exhausted = want.asks > _MAX_ASKS
        if exhausted:
            self._settle(key)
            self._thread.tell(lambda runner: runner.fail_tiles(key, *ENCODING_FAILED))
        else:
            self._ask(WantVisual(call, key))

    def _encode_here(self, key: VisualKey, message: InboxMessage) -> None:
        lease = Lease.take(self._ledger, self._level2.form.entry(key), ENCODING_FAILED)
        if lease is None:
            return
        try:
            data = self._blobs.get(message.blob)
            tiles = None if data is None else from_bytes(data, planned_grid(message.grid))
        except ValueError:
            self._blobs.delete(message.blob)
            lease.end("failed")
            return
        except BaseException:
            lease.end("failed")
            raise
        if tiles is None:
            lease.end("undone")  # whoever waits puts them there again
            return
        with self._lock:
            want = self._wants.get(key)
        encode = _Encode(lease, want.num_rows if want else 0, message.blob)

        def put(runner: EngineRunner) -> None:
            self._encoding[key] = encode
            runner.put_tiles(key, tiles)

        self._settle(key)
        self._thread.tell(put)

    def _share(
        self,
        key: VisualKey,
        encode: _Encode,
        rows: Any | None,
        failure: tuple[str, str] | None,
    ) -> None:
        """The lease ends with the result in level 2, with a verdict, or undone: nobody here wants it."""
        outcome: Outcome = "done" if rows is not None or failure is not None else "undone"
        try:
            if rows is not None and encode.num_rows not in (0, len(rows)):
                outcome = "failed"
                self._blobs.delete(encode.blob)  # tiles of another grid; whoever waits puts them there again
            elif rows is not None:
                self._level2.put(key, rows)
            elif failure is not None:
                encode.lease.judge(*failure)
        except BlobStoreFull:
            full = overloaded()
            encode.lease.judge(full.code, full.message)
        finally:
            encode.lease.end(outcome)
