"""A generate replica: one engine that the tasks of one Celery worker share.

node --task--> `run` --> engine thread --events--> the node's stream
node --inbox--> visual tokens are there, cancel, ...
A heartbeat says that it lives and how busy it is, also in the middle of a long step. An engine that fails, or
hangs, ends the process: nodes go elsewhere.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from llm.request import Event, Failed, Request, RequestError, WantVisual
from workers.cluster.blobs import open_store
from workers.cluster.event_stream import EventPublisher, Refused, Started, StreamEvent
from workers.cluster.ledger import WorkLedger
from workers.cluster.members import About, HeartbeatThread, Registry, Watch
from workers.cluster.names import ENCODE_QUEUE, NODE, REPLICA, GenerateJob, InboxMessage, Mailbox
from workers.cluster.redis_client import AWAY, AWAY_PAUSE_S, connect
from workers.cluster.redis_clock import RedisClock
from workers.cluster.visual_store import VisualStore, open_visual_blobs
from workers.cluster.worker.replica_visuals import ReplicaVisuals
from workers.contract.faults import TIMED_OUT, UNREADABLE
from workers.contract.loops import LoopThread
from workers.contract.messages import request_from_json
from workers.contract.streams import is_last
from workers.contract.versions import FIRST_VERSION, MESSAGE_VERSION, note_dropped, version_of
from workers.contract.visual_format import VisualFormat
from workers.local.engine_runner import EngineRunner
from workers.local.progress import STALL_S, Progress
from workers.local.step_thread import StepThread

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # for a Redis that is away, and for an answer's last events
_STATS_S = 1.0
NODE_PATIENCE_S = 30.0  # for a node that is silent: one that is cut off comes back for its answers


@dataclass(slots=True)
class _Call:
    node: str
    node_version: int
    request: Request
    ended: threading.Event = field(default_factory=threading.Event)


class Replica:
    """Threads: engine, publisher, heartbeat, inbox reader, caretaker, and one for each task under way."""

    def __init__(
        self,
        name: str,
        store: str,
        make_runner: Callable[[Progress], EngineRunner],
        on_crash: Callable[[], None],
        stall_s: float = STALL_S,
    ) -> None:
        """on_crash: the engine is beyond repair, or made no progress for `stall_s`; called after the replica
        has left the registry."""
        self.name = name
        self.boot = uuid.uuid4().hex
        self._on_crash = on_crash
        self._client = connect(store, _PATIENCE_S)
        self._clock = RedisClock(self._client)
        self._mailbox = Mailbox(self._client)
        self._inbox = Mailbox(connect(store))
        self._nodes = Watch(Registry(connect(store), NODE))
        self._calls: dict[str, _Call] = {}
        self._lock = threading.Lock()
        self._draining = self._crashed = False
        self._beats = 0
        self._stats: dict[str, Any] = {}
        self._wait_s = 0.0  # mean time from sent to taken up, exponentially weighted
        self._thread: StepThread[EngineRunner, list[Event]] = StepThread(
            make_runner, self._after_step, self._crash, stall_s=stall_s
        )
        self._publisher = EventPublisher(connect(store), self._ended)
        self._info = self._thread.start().info()
        form = VisualFormat(self._info["encoder_revision"], self._info["dtype"], self._info["visual_width"])
        self._visuals = ReplicaVisuals(
            self._thread,
            VisualStore(open_visual_blobs(store), form),
            open_store(store),
            WorkLedger(self._client, ENCODE_QUEUE),
            lambda want: self._publisher.feed([want]),
        )
        self._heartbeat = HeartbeatThread(Registry(connect(store), REPLICA), name, self._about)
        self._inbox_reader = LoopThread("the reader of the inbox", self._read_inbox, AWAY, AWAY_PAUSE_S)
        self._caretaker = LoopThread("the replica's caretaker", self._look_after, AWAY, AWAY_PAUSE_S)

    def start(self) -> None:
        self._publisher.start()
        self._inbox_reader.start()
        self._caretaker.start()
        self._heartbeat.start()

    def drain(self) -> None:
        """Takes no new requests; running ones go on."""
        self._draining = True
        self._heartbeat.beat_now()

    def close(self) -> None:
        self._heartbeat.close()
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.ended.set()
        self._inbox_reader.close()
        self._caretaker.close()
        self._thread.close()
        self._visuals.close()
        self._publisher.close()

    def run(self, job: GenerateJob) -> None:
        """One attempt, from message to last event. Harmless for a message that comes twice or late."""
        version = version_of(job.request)
        # the first version's time is another host's and compares with nothing
        waited_s = self._clock.age_s(job.sent_at) if version > FIRST_VERSION else 0.0
        left_s = job.deadline_s - waited_s
        if left_s <= 0 or self._mailbox.is_cancelled(job.call):
            return
        if not self._mailbox.mark_started(job.call, self.name, job.deadline_s):
            return
        self._wait_s += 0.1 * (waited_s - self._wait_s)
        self._publisher.open(job.call, job.node)
        try:
            request = replace(request_from_json(job.request), id=job.call)
        except ValueError:
            log.exception("a request could not be read")
            self._publisher.feed([Failed(job.call, *UNREADABLE)])
            return
        call = _Call(job.node, version, request)
        with self._lock:
            self._calls[job.call] = call
        self._publisher.feed([Started(job.call)])
        self._thread.tell(lambda runner: self._submit(runner, request))
        if not call.ended.wait(left_s):
            self._thread.tell(lambda runner: runner.cancel(job.call))
            self._publisher.feed([Failed(job.call, *TIMED_OUT)])
            call.ended.wait(_PATIENCE_S)
        self._forget(job.call)

    def _submit(self, runner: EngineRunner, request: Request) -> None:
        try:
            runner.submit(request)
        except RequestError as error:
            self._publisher.feed([Refused(request.id, error.code, error.message, error.param)])

    def _after_step(self, runner: EngineRunner, events: list[Event]) -> None:
        told: list[StreamEvent] = []
        for event in events:
            if not isinstance(event, WantVisual):
                told.append(event)
                if is_last(event):
                    self._visuals.forget_call(event.request_id)
            elif call := self._calls.get(event.request_id):
                self._visuals.want(event, call.request)
        if told:
            self._publisher.feed(told)
        self._visuals.after_step(runner)

    def _ended(self, name: str) -> None:
        with self._lock:
            call = self._calls.get(name)
        if call is not None:
            call.ended.set()

    def _cancel(self, name: str) -> None:
        self._publisher.discard(name)
        self._thread.tell(lambda runner: runner.cancel(name))
        self._ended(name)

    def _forget(self, name: str) -> None:
        self._publisher.discard(name)
        self._visuals.forget_call(name)
        with self._lock:
            self._calls.pop(name, None)

    def _crash(self) -> None:
        self._crashed = True  # a beat that is due does not bring it back
        self._heartbeat.leave()
        self._on_crash()

    def _about(self) -> About | None:
        if self._crashed:
            return None
        with self._lock:
            active = len(self._calls)
        self._beats += 1
        return {
            **self._info,
            "version": MESSAGE_VERSION,
            "beat": self._beats,
            "boot": self.boot,
            "draining": self._draining,
            "active": active,
            "wait_ms": round(self._wait_s * 1e3, 1),
            "stats": self._stats,
        }

    def _read_inbox(self) -> None:
        message = self._inbox.receive(self.name)
        if message is not None:
            self._take(message)

    def _take(self, message: InboxMessage) -> None:
        match message.op:
            case "cancel":
                self._cancel(message.key)
            case "clear":
                self._thread.tell(lambda runner: runner.clear_cache())
            case "visual" | "tiles" | "fail":
                self._visuals.take(message)
            case "alive":
                self._greet(message.key, message.calls)
            case other:
                note_dropped("kind of inbox message", other)

    def _greet(self, node: str, calls: tuple[str, ...]) -> None:
        """A node is back and waits for calls; those that are not here will never end by themselves."""
        with self._lock:
            missing = [call for call in calls if call not in self._calls]
        for call in missing:
            self._publisher.abandon(call, node)

    def _look_after(self) -> None:
        """Once a second: figures for the heartbeat, lost messages, calls whose node is gone."""
        self._caretaker.pause(_STATS_S)
        self._thread.tell(self._note_stats)
        self._thread.tell(self._visuals.after_step)
        self._visuals.look_again()
        if not self._nodes.refresh():
            return
        with self._lock:
            calls = list(self._calls.items())
        for name, call in calls:
            if self._nodes.is_gone(call.node, NODE_PATIENCE_S):
                log.warning("a request's node is gone: cancelled")
                self._cancel(name)
                if call.node_version > FIRST_VERSION:
                    self._publisher.abandon(name, call.node)  # in case it comes back after all

    def _note_stats(self, runner: EngineRunner) -> None:
        level2 = {"hits": self._visuals.level2_hits, "misses": self._visuals.level2_misses}
        self._stats = {**runner.stats(), "visual_level2": level2}
