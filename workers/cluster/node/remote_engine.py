"""The engine as an API node sees it when it runs elsewhere: many replicas, reached over Celery and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from llm.request import Event, Failed, Request, RequestError, VisualKey, WantVisual
from workers.cluster.blobs import open_store
from workers.cluster.celery_app import make_app, passing_queue
from workers.cluster.event_stream import EventReader, Refused, event_of
from workers.cluster.ledger import WorkLedger
from workers.cluster.members import HeartbeatThread, Registry, Watch
from workers.cluster.names import (
    ENCODE_QUEUE,
    ENCODER,
    GENERATE_TASK,
    NODE,
    REPLICA,
    GenerateJob,
    InboxMessage,
    Mailbox,
    generate_queue,
    task_headers,
)
from workers.cluster.node.remote_calls import Lost, RemoteCall
from workers.cluster.node.remote_visuals import AWAY, SEND_RETRY, RemoteVisuals
from workers.cluster.node.replica_choice import SPILL_THRESHOLD, choose, routing_key
from workers.cluster.node.replica_loads import ReplicaLoads
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import connect
from workers.cluster.redis_clock import RedisClock
from workers.cluster.visual_store import open_visual_blobs
from workers.contract.engine_client import ENGINE_DIED, SHUTTING_DOWN, EngineUnavailable
from workers.contract.faults import TIMED_OUT
from workers.contract.loops import keep_going, log_failure
from workers.contract.messages import request_to_json
from workers.contract.stages import MAX_ATTEMPTS
from workers.contract.streams import end_tasks, is_last
from workers.contract.tiles_handle import TilesHandle
from workers.contract.versions import FIRST_VERSION, MESSAGE_VERSION, version_of

log = logging.getLogger(__name__)

UNAVAILABLE = "no engine is available"
Router = Callable[[str, Mapping[str, float]], str]
_LOOK_S = 0.25  # how often heartbeats are read
_DRAIN_GRACE_S = 0.1  # for the word that a call was started after all
_THREADS = 16
_PATIENCE_S = 15.0  # for a first replica, after Redis was away
_RETRY_PATIENCE_S = 60.0  # for another replica, once an answer is owed
_DEADLINE_MARGIN_S = 2.0  # the replica's own deadline passes first


class RemoteEngine:
    """`EngineClient` over the queues `generate.<replica>`."""

    def __init__(
        self,
        broker: str,
        store: str,
        *,
        revision: str | None = None,
        deadline_s: float = 300.0,
        image_deadline_s: float = 60.0,
        router: Router | None = None,
    ) -> None:
        """revision: of the encoder that replicas must have; None takes any. Raises ValueError for other URLs
        than Redis's; connects to nothing yet."""
        self.node = uuid.uuid4().hex
        self._app = make_app(broker)
        self._deadline_s = deadline_s
        self._image_deadline_s = image_deadline_s
        self._router = router or (lambda key, loads: choose(key, loads, SPILL_THRESHOLD))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote-engine")
        client = connect(store)
        self._clock = RedisClock(client)
        self._mailbox = Mailbox(connect(store, patience_s=_PATIENCE_S))
        self._replicas = Watch(Registry(client, REPLICA))
        self._encoders = Watch(Registry(client, ENCODER))
        self._heartbeat = HeartbeatThread(
            Registry(connect(store), NODE), self.node, lambda: {"version": MESSAGE_VERSION}
        )
        self._visuals = RemoteVisuals(
            self._app,
            store,
            open_store(store),
            open_visual_blobs(store),
            WorkLedger(client, ENCODE_QUEUE),
            self._mailbox,
            self._replicas,
            self._encoders,
            self._threads,
        )
        self._queues = QueueStats(connect(broker), client)
        self._reader = EventReader(store, self.node, self._take)
        self._calls: dict[str, RemoteCall] = {}  # by the name of the present attempt
        self._open: set[str] = set()  # request ids
        self._loads = ReplicaLoads(self._replicas, self._calls, revision)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Some replica takes requests."""
        return self._replicas.in_contact and bool(self._loads.candidates())

    @property
    def info(self) -> dict[str, Any]:
        return {"replicas": sorted(self._replicas.alive), "encoders": sorted(self._encoders.alive)}

    async def start(self) -> None:
        await self._run(self._look)
        self._heartbeat.start()
        self._tasks = [
            asyncio.create_task(job)
            for job in (
                self._reader.run(),
                self._visuals.listen(),
                keep_going("the node's look at its replicas", self._look_after, AWAY, _LOOK_S),
            )
        ]

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        for call in list(self._calls.values()):
            call.events.put_nowait(Failed(call.request.id, *SHUTTING_DOWN))
        await asyncio.to_thread(self._heartbeat.close)
        await asyncio.to_thread(self._threads.shutdown)
        self._app.close()

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        if request.id in self._open:
            raise ValueError("request id is already in use")
        call = self._new_call(request)
        self._open.add(request.id)
        finished = False
        try:
            await self._begin(call, _PATIENCE_S)
            while not finished:
                event = await self._next(call)
                finished = is_last(event)
                yield event
        finally:
            self._open.discard(request.id)
            self._end(call, finished)

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        await self._visuals.provide(key, tiles, self._image_deadline_s)
        for call in self._calls.values():
            if not self._visuals.is_wanted(key, call.replica):
                call.wants.discard(key)

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        """Of this node's calls alone: another node may well have the tiles."""
        for call in [call for call in self._calls.values() if key in call.wants]:
            self._visuals.unwant(key, call.replica)
            call.events.put_nowait(Failed(call.request.id, code, message))
            self._cancel(call)

    async def stats(self) -> dict[str, Any]:
        """Sums over the living replicas, and the queues'. Raises EngineUnavailable."""
        try:
            queues = await self._run(self._queues.read, sorted(self._replicas.alive))
        except AWAY:
            raise EngineUnavailable(UNAVAILABLE) from None
        total = self._loads.stats()
        total["queues"] = queues
        for name, about in self._replicas.alive.items():
            queues.get(generate_queue(name), {})["wait_ms"] = about.get("wait_ms", 0.0)
        return total

    async def clear_cache(self) -> None:
        for name in sorted(self._replicas.alive):
            await self._run(self._post, name, InboxMessage("clear"))

    def _new_call(self, request: Request) -> RemoteCall:
        if request.params.seed is None:
            params = replace(request.params, seed=secrets.randbits(63))
            request = replace(request, params=params)
        now = time.monotonic()
        key = routing_key(request.prompt, request.namespace)
        return RemoteCall(request, key, now, now + self._deadline_s)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _begin(self, call: RemoteCall, patience_s: float) -> None:
        """Sends the next attempt. Raises EngineUnavailable once no replica or no Redis was there so long, or
        the request's time is over.

        Without an outage it fails at once if no replica exists, unless an answer is owed already.
        """
        self._calls.pop(call.name, None)
        call.begin_attempt()
        self._calls[call.name] = call
        started = time.monotonic()
        while True:
            loads = self._loads.candidates()
            if loads:
                call.replica = self._router(call.routing_key, loads)
                about = self._replicas.alive[call.replica]
                call.boot, call.reader_version = about.get("boot", ""), version_of(about)
                if await self._send(call):
                    return
            elif self._replicas.settled and call.attempt == 1:
                raise EngineUnavailable(UNAVAILABLE)
            if time.monotonic() - started > patience_s or call.left_s <= 0:
                raise EngineUnavailable(UNAVAILABLE)
            await asyncio.sleep(0.1)

    async def _send(self, call: RemoteCall) -> bool:
        outages = self._replicas.outages
        try:
            await self._run(self._send_job, call)
        except AWAY:
            return False
        call.outages = outages
        call.sent = time.monotonic()
        if call.state == "sending":
            call.state = "sent"
        return True

    def _send_job(self, call: RemoteCall) -> None:
        request = request_to_json(call.request, call.reader_version)
        left_s = call.left_s - _DEADLINE_MARGIN_S
        job = GenerateJob(call.name, self.node, request, left_s, self._clock.now())
        self._send_task(generate_queue(call.replica), job)

    def _send_task(self, queue: str, job: GenerateJob) -> None:
        self._app.send_task(
            GENERATE_TASK,
            kwargs=asdict(job),
            queue=passing_queue(queue),
            headers=task_headers(job.sent_at),
            retry=True,
            retry_policy=SEND_RETRY,
        )

    async def _next(self, call: RemoteCall) -> Event:
        """The next event for the caller; replaces lost attempts. Raises RequestError."""
        while True:
            try:
                # not `wait_for`, which swallows a cancellation that comes along with an event (Python < 3.12)
                async with asyncio.timeout(call.left_s):
                    event = await call.events.get()
            except TimeoutError:
                return Failed(call.request.id, *TIMED_OUT)
            if isinstance(event, Refused):
                raise RequestError(event.code, event.message, event.param)
            if not isinstance(event, Lost):
                return event
            if event.attempt != call.attempt:
                continue
            if call.attempt >= MAX_ATTEMPTS:
                return Failed(call.request.id, *ENGINE_DIED)
            log.warning("attempt %d of a request was lost: sent again", call.attempt)
            try:
                await self._begin(call, _RETRY_PATIENCE_S)
            except EngineUnavailable:
                return Failed(call.request.id, *ENGINE_DIED)

    def _take(self, name: str, number: int, events: list[dict[str, Any]]) -> None:
        call = self._calls.get(name)
        if call is None:
            return
        try:
            parsed = [event for event in map(event_of, events) if event is not None]
        except ValueError:
            log.exception("events of a request could not be read")
            call.lose()
            return
        for event in parsed:
            if isinstance(event, WantVisual):
                rows = call.request.prompt.planned_rows()
                self._visuals.want(event.key, call.replica, rows.get(event.key, 0))
        call.take(number, parsed)

    def _end(self, call: RemoteCall, finished: bool) -> None:
        self._calls.pop(call.name, None)
        for key in call.wants:
            others = (other for other in self._calls.values() if other.replica == call.replica)
            if not any(key in other.wants for other in others):
                self._visuals.unwant(key, call.replica)
        if not finished and call.replica:
            self._cancel(call)

    def _cancel(self, call: RemoteCall) -> None:
        """In the background."""

        def cancel(replica: str, name: str) -> None:
            with contextlib.suppress(*AWAY):
                self._mailbox.cancel(replica, name, self._deadline_s)

        self._threads.submit(cancel, call.replica, call.name).add_done_callback(log_failure)

    def _post(self, replica: str, message: InboxMessage) -> None:
        self._mailbox.post(replica, message, self._version(replica))

    def _version(self, replica: str) -> int:
        return version_of(self._replicas.alive.get(replica, {}))

    def _leaves_behind(self, call: RemoteCall) -> bool:
        """A replica that drains takes nothing more from its queue."""
        about = self._replicas.alive.get(call.replica, {})
        return bool(about.get("draining")) and time.monotonic() - call.sent > _DRAIN_GRACE_S

    def _look(self) -> None:
        self._replicas.refresh()
        self._encoders.refresh()

    async def _look_after(self) -> None:
        """Notices dead replicas, and sends again what Redis may have forgotten while it was away."""
        await asyncio.sleep(_LOOK_S)
        await self._run(self._look)
        self._loads.count_others()
        away: dict[str, list[RemoteCall]] = {}  # calls whose replicas may have heard nothing of this node
        for call in list(self._calls.values()):
            if call.state in ("sending", "lost"):
                continue
            if self._replicas.is_dead(call.replica, call.boot):
                self._visuals.forget(call.replica)
                call.lose()
            elif call.state == "sent" and self._leaves_behind(call):
                self._cancel(call)
                call.lose()
            elif self._replicas.returned_since(call.outages):
                if call.state == "sent":
                    await self._send(call)  # harmless if it was not forgotten; else at the next look
                elif call.replica in self._replicas.alive:
                    away.setdefault(call.replica, []).append(call)
        for replica, calls in away.items():
            await self._greet(replica, calls)

    async def _greet(self, replica: str, calls: list[RemoteCall]) -> None:
        """Tells a replica that this node lives and waits for its calls. Raises as Redis does while away."""
        outages = self._replicas.outages
        if self._version(replica) > FIRST_VERSION:
            names = tuple(call.name for call in calls)
            await self._run(self._post, replica, InboxMessage("alive", self.node, calls=names))
        for call in calls:
            call.outages = outages
