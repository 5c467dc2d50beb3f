"""Events on their way from a replica to an API node: one Redis stream per node.

An entry holds batches of events: [call, number of the batch, [event, ...]]. Numbers run from 0 for each
call, so that a reader knows what it has already (written twice around a lost connection) and what is missing
(Redis lost data). A reader resumes from the last entry that it took, and trims what it has taken. A batch of
number ABANDONED says that nothing more of its call will come, as its replica has dropped it or never had it.

Back-pressure: once a stream has MAX_LAG entries its events stay with the replica, where a choice's deltas
melt into one. A node that does not read holds up nobody and costs at most the text that its calls may make.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import redis
import redis.asyncio

from llm.request import Delta, Event, Finished
from workers.cluster.redis_client import AWAY, AWAY_PAUSE_S
from workers.contract.loops import LoopThread, keep_going
from workers.contract.messages import event_from_json, event_to_json
from workers.contract.streams import is_last
from workers.contract.versions import MESSAGE_VERSION, known_fields

log = logging.getLogger(__name__)

MAX_LAG = 64  # entries
ABANDONED = -1
_STREAM_TTL_S = 120
_LAG_POLL_S = 0.05
_BLOCK_MS = 1000
_TRIM_EVERY = 16  # entries


@dataclass(frozen=True, slots=True)
class Started:
    """A replica has taken the call up."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """`RequestError` of the engine's `submit`; the call's last event."""

    request_id: str
    code: str
    message: str
    param: str | None = None


StreamEvent = Event | Started | Refused


def stream_name(node: str) -> str:
    return f"vlm:events:{node}"


def append_event(events: list[StreamEvent], event: StreamEvent) -> None:
    """Appends; a delta melts into its choice's last one, unless the choice ended between them."""
    if isinstance(event, Delta):
        for index in range(len(events) - 1, -1, -1):
            last = events[index]
            if isinstance(last, Delta | Finished) and last.choice == event.choice:
                if isinstance(last, Delta):
                    events[index] = replace(
                        last,
                        token_ids=last.token_ids + event.token_ids,
                        text=last.text + event.text,
                        logprobs=last.logprobs + event.logprobs,
                    )
                    return
                break
    events.append(event)


@dataclass(slots=True)
class _Outgoing:
    node: str
    next_batch: int = 0
    ended: bool = False  # its last event is among `events`
    events: list[StreamEvent] = field(default_factory=list)


class EventPublisher:
    """Writes the events of all calls from one thread; waits for a Redis that is away."""

    def __init__(self, client: redis.Redis, on_ended: Callable[[str], None], max_lag: int = MAX_LAG) -> None:
        """on_ended: told a call whose last event is written; on the publisher's thread."""
        self._client = client
        self._on_ended = on_ended
        self._max_lag = max_lag
        self._calls: dict[str, _Outgoing] = {}
        self._lags: dict[str, int] = {}  # entries in each node's stream when last seen
        self._abandoned: list[tuple[str, str]] = []  # calls and their nodes
        self._changed = threading.Condition()
        self._stopping = False
        self._loop = LoopThread("the publisher of events", self._turn)

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._loop.close()

    def open(self, call: str, node: str) -> None:
        with self._changed:
            self._calls[call] = _Outgoing(node)

    def discard(self, call: str) -> None:
        """Nothing more of this call is written."""
        with self._changed:
            self._calls.pop(call, None)

    def feed(self, events: Sequence[StreamEvent]) -> None:
        """Events of calls that aren't open, or have ended, are dropped. Never blocks on Redis."""
        with self._changed:
            for event in events:
                outgoing = self._calls.get(event.request_id)
                if outgoing is not None and not outgoing.ended:
                    append_event(outgoing.events, event)
                    outgoing.ended = _ends(event)
            self._changed.notify()

    def abandon(self, call: str, node: str) -> None:
        """Tells the node that no more of this call will come, after what was written of it before."""
        with self._changed:
            self._calls.pop(call, None)
            self._abandoned.append((call, node))
            self._changed.notify()

    @property
    def num_pending(self) -> int:
        """Events that wait for Redis or for a reader that lags."""
        with self._changed:
            return sum(len(outgoing.events) for outgoing in self._calls.values())

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._ready() or bool(self._lagging()))
            lagging = self._lagging()
            if lagging and not self._ready():
                self._changed.wait(_LAG_POLL_S)
            if self._stopping:
                return True
            entries, ended = self._take()
        if lagging:
            self._look_at(lagging)
        if entries:
            try:
                self._write(entries)
            finally:
                for call in ended:
                    self._on_ended(call)
        return False

    def _ready(self) -> bool:
        return bool(self._abandoned) or any(
            o.events and self._lags.get(o.node, 0) < self._max_lag for o in self._calls.values()
        )

    def _lagging(self) -> list[str]:
        nodes = {o.node for o in self._calls.values() if o.events}
        return sorted(node for node in nodes if self._lags.get(node, 0) >= self._max_lag)

    def _take(self) -> tuple[dict[str, list[Any]], list[str]]:
        """What may be written now, by node, and the calls that end with it."""
        entries: dict[str, list[Any]] = {}
        ended = []
        for call, outgoing in list(self._calls.items()):
            if not outgoing.events or self._lags.get(outgoing.node, 0) >= self._max_lag:
                continue
            events, outgoing.events = outgoing.events, []
            batch = [call, outgoing.next_batch, [_to_json(event) for event in events]]
            entries.setdefault(outgoing.node, []).append(batch)
            outgoing.next_batch += 1
            if outgoing.ended:
                del self._calls[call]
                ended.append(call)
        for call, node in self._abandoned:
            entries.setdefault(node, []).append([call, ABANDONED, []])
        self._abandoned.clear()
        return entries, ended

    def _write(self, entries: dict[str, list[Any]]) -> None:
        away = False
        while not self._stopping:
            try:
                with self._client.pipeline(transaction=False) as pipeline:
                    for node, batches in entries.items():
                        text = json.dumps(batches, separators=(",", ":"), ensure_ascii=False)
                        pipeline.xadd(stream_name(node), {"b": text, "v": MESSAGE_VERSION})
                        pipeline.expire(stream_name(node), _STREAM_TTL_S)
                        pipeline.xlen(stream_name(node))
                    lengths = pipeline.execute()[2::3]
                self._lags.update(zip(entries, lengths, strict=True))
                return
            except AWAY as error:
                # away, or at its memory limit: either way it is tried again
                if not away:
                    log.warning("events could not be written: %s", error)
                away = True
                time.sleep(AWAY_PAUSE_S)

    def _look_at(self, nodes: list[str]) -> None:
        try:
            for node in nodes:
                self._lags[node] = int(self._client.xlen(stream_name(node)))
        except AWAY:
            time.sleep(AWAY_PAUSE_S)


class EventReader:
    """Reads a node's stream for ever, across lost connections, from where it was."""

    def __init__(self, url: str, node: str, take: Callable[[str, int, list[dict[str, Any]]], None]) -> None:
        """take: told (call, batch number, events as JSON values), on the event loop."""
        self._url = url
        self._stream = stream_name(node)
        self._take = take
        self._last = "0"
        self._untrimmed = 0

    async def run(self) -> None:
        async with redis.asyncio.from_url(
            self._url, socket_timeout=_BLOCK_MS / 1000 + 2.0, socket_connect_timeout=2.0
        ) as client:
            await keep_going("the reader of events", lambda: self._read(client), AWAY, AWAY_PAUSE_S)

    async def _read(self, client: redis.asyncio.Redis) -> None:
        found = cast("list[Any]", await client.xread({self._stream: self._last}, count=100, block=_BLOCK_MS))
        entries = found[0][1] if found else []
        for entry_id, fields in entries:
            self._last = entry_id.decode()
            self._untrimmed += 1
            try:
                for call, number, events, *_ in json.loads(fields[b"b"]):
                    self._take(call, number, events)
            except (KeyError, TypeError, ValueError):
                log.exception("an entry of events could not be read: its calls have a gap")
        if self._untrimmed >= _TRIM_EVERY or (self._untrimmed and not entries):
            await client.xtrim(self._stream, minid=_after(self._last), approximate=False)
            self._untrimmed = 0


def _to_json(event: StreamEvent) -> dict[str, Any]:
    if isinstance(event, Started | Refused):
        return {"type": type(event).__name__, **asdict(event)}
    return event_to_json(event)


def event_of(value: dict[str, Any]) -> StreamEvent | None:
    """None for a kind of event that is not known. Raises ValueError for what can't be read."""
    kinds: dict[str, type[Started | Refused]] = {"Started": Started, "Refused": Refused}
    if not isinstance(value, dict) or (kind := kinds.get(value.get("type", ""))) is None:
        return event_from_json(value)
    fields = known_fields(kind, {name: field for name, field in value.items() if name != "type"})
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"not an event: {error}") from None


def _ends(event: StreamEvent) -> bool:
    return isinstance(event, Refused) or (not isinstance(event, Started) and is_last(event))


def _after(entry_id: str) -> str:
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds}-{int(sequence) + 1}"
