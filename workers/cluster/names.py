"""Names and messages that nodes, replicas and encode workers share.

In Redis: registries `vlm:{node,replica,encoder}:*`, a stream of events per node, an inbox (a list) per
replica, and per attempt a mark that it was started and one that it is cancelled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from preprocess.types import TileGrid
from workers.contract.versions import FIRST_VERSION, MESSAGE_VERSION, known_fields

if TYPE_CHECKING:
    import redis

    from workers.cluster.redis_clock import RedisClock

MEMORY_STORE = "memory://"  # a blob store of this process alone
GENERATE_TASK = "generate.run"
ENCODE_TASK = "encode.image"
ENCODE_QUEUE = "encode"
GENERATE_PREFIX = "generate."  # of replicas' queues
SENT_HEADER = "vlm-sent-at"  # on Redis's clock, since version 2; before, on that of whoever sent it
VERSION_HEADER = "vlm-version"
ROWS_HEADER = "vlm-num-rows"  # visual tokens that the image's plan has
GRID_HEADER = "vlm-grid"  # of its tiles: rows, columns, thumbnail, tile width and height
NODE, REPLICA, ENCODER = "node", "replica", "encoder"
TILES_TTL_S = 120.0
_INBOX_TTL_S = 120
_MARK_MARGIN_S = 60.0


def generate_queue(replica: str) -> str:
    return GENERATE_PREFIX + replica


def encoder_tiles_blob(key: str) -> str:
    """Tiles on their way to their encoder."""
    return f"encoder-tiles:{key}"


@dataclass(frozen=True, slots=True)
class TilesJob:
    """What the message says; every field is a JSON value. Image and tiles travel through the blob store."""

    key: str  # `tiles_key` of the result
    digest: str  # sha256 of the file
    spec: dict[str, Any]
    limits: dict[str, Any]
    cpu_s: int
    page: int = 0  # of a file of several, for workers that can't do without

    @property
    def image_blob(self) -> str:
        return image_blob(self.digest)

    @property
    def tiles_blob(self) -> str:
        return tiles_blob(self.key)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def image_blob(digest: str) -> str:
    return f"image:{digest}"


def tiles_blob(key: str) -> str:
    return f"tiles:{key}"


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One attempt at one call; every field is a JSON value."""

    call: str  # unique per attempt; the request's id inside the replica
    node: str
    request: dict[str, Any]
    deadline_s: float  # from being sent
    sent_at: float  # on Redis's clock


@dataclass(frozen=True, slots=True)
class EncodeJob:
    key: str
    revision: str  # of the encoder meant
    dtype: str
    tiles_blob: str
    deadline_s: float  # from being sent to being begun
    sent_at: float  # on Redis's clock


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """What a node tells a replica. `visual`: level 2 has the key; `tiles`: encode it yourself from the blob;
    `fail`: it can't be had; `cancel`: nobody reads `key`'s call any more; `clear`: forget caches; `alive`,
    since version 2: the node `key`, which was away, waits for these `calls`."""

    op: Literal["visual", "tiles", "fail", "cancel", "clear", "alive"]
    key: str = ""
    blob: str = ""
    code: str = ""
    message: str = ""
    calls: tuple[str, ...] = ()
    version: int = FIRST_VERSION
    grid: tuple[int, ...] = ()  # of `tiles`, as planned; empty if the writer does not say

    def to_json(self, reader_version: int) -> dict[str, Any]:
        """The first version refuses fields that it does not know."""
        value = {**asdict(self), "version": MESSAGE_VERSION}
        if reader_version == FIRST_VERSION:
            del value["calls"], value["version"], value["grid"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> InboxMessage:
        """Raises TypeError."""
        message = cls(**known_fields(cls, value))
        return replace(message, calls=tuple(message.calls), grid=tuple(message.grid))


def planned_grid(values: Sequence[int]) -> TileGrid | None:
    """Of `GRID_HEADER` or `InboxMessage.grid`. Raises TypeError."""
    return TileGrid(*values) if values else None  # type: ignore[arg-type]


def task_headers(sent_at: float, **more: Any) -> dict[str, Any]:
    """Of a Celery message; they hold what the first version, whose tasks refuse unknown fields, lacks."""
    return {SENT_HEADER: sent_at, VERSION_HEADER: MESSAGE_VERSION, **more}


def waited_s(headers: Mapping[str, Any] | None, clock: RedisClock) -> float:
    """Since the message was sent; 0 if it does not say. May raise `redis.RedisError`.

    The first version's time is another host's and compares with nothing.
    """
    headers = headers or {}
    sent_at, version = headers.get(SENT_HEADER), headers.get(VERSION_HEADER, FIRST_VERSION)
    if not isinstance(sent_at, float) or version == FIRST_VERSION:
        return 0.0
    return clock.age_s(sent_at)


class Mailbox:
    """Inboxes and marks. Every method may raise `redis.RedisError`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def post(self, replica: str, message: InboxMessage, reader_version: int = FIRST_VERSION) -> None:
        """reader_version: of the replica, as its heartbeat says."""
        with self._client.pipeline() as pipeline:
            pipeline.rpush(self._inbox(replica), json.dumps(message.to_json(reader_version)))
            pipeline.expire(self._inbox(replica), _INBOX_TTL_S)
            pipeline.execute()

    def receive(self, replica: str, timeout_s: float = 1.0) -> InboxMessage | None:
        """The next message, if one comes in time. Raises ValueError or TypeError for one that is none."""
        found = cast("list[bytes] | None", self._client.blpop([self._inbox(replica)], timeout_s))
        return InboxMessage.from_json(json.loads(found[1])) if found else None

    def mark_started(self, call: str, replica: str, deadline_s: float) -> bool:
        """False if the attempt was started before: its message came twice."""
        ttl_ms = round((deadline_s + _MARK_MARGIN_S) * 1000)
        return bool(self._client.set(f"vlm:started:{call}", replica, nx=True, px=ttl_ms))

    def cancel(self, replica: str, call: str, deadline_s: float) -> None:
        ttl_ms = round((deadline_s + _MARK_MARGIN_S) * 1000)
        self._client.set(f"vlm:cancelled:{call}", b"1", px=ttl_ms)
        self.post(replica, InboxMessage("cancel", call))

    def is_cancelled(self, call: str) -> bool:
        return bool(self._client.exists(f"vlm:cancelled:{call}"))

    def _inbox(self, replica: str) -> str:
        return f"vlm:inbox:{replica}"
