"""Who is alive: heartbeats in Redis, one registry per kind of member (replica, encoder, node)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import redis
import redis.exceptions

from workers.cluster.redis_client import AWAY
from workers.contract.loops import LoopThread

log = logging.getLogger(__name__)

BEAT_S = 1.0
MEMBER_TTL_S = 5.0
GRACE_S = 3.0  # after Redis was away: members beat again before anybody counts as dead
_FORGET_S = 3600.0

About = Mapping[str, Any]

# KEYS: of the member, names. ARGV: name, what it says, ttl in ms, seconds until a silent name is forgotten
_BEAT = """
local t = redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], t[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', t[1] - ARGV[4])
"""


class Registry:
    """Heartbeats of one kind. Every method may raise `redis.RedisError`.

    All times are Redis's own: a member whose clock is wrong forgets no other.
    """

    def __init__(self, client: redis.Redis, kind: str) -> None:
        self._client = client
        self._prefix = f"vlm:{kind}"
        self._names = f"vlm:{kind}s"
        self._beat = client.register_script(_BEAT)

    def beat(self, name: str, about: About) -> None:
        """`name` is alive for MEMBER_TTL_S from now."""
        args: list[str | int] = [name, json.dumps(about), round(MEMBER_TTL_S * 1000), round(_FORGET_S)]
        self._beat(keys=[self._key(name), self._names], args=args)

    def leave(self, name: str) -> None:
        with self._client.pipeline() as pipeline:
            pipeline.delete(self._key(name))
            pipeline.zrem(self._names, name)
            pipeline.execute()

    def alive(self) -> dict[str, About]:
        """What the living said last, by name."""
        return {name: about for name, about in self.members().items() if about is not None}

    def members(self) -> dict[str, About | None]:
        """What they said last, by name; None for those who fell silent and did not leave."""
        found = cast("list[bytes]", self._client.zrange(self._names, 0, -1))
        names = sorted(name.decode() for name in found)
        if not names:
            return {}
        values = cast("list[bytes | None]", self._client.mget([self._key(name) for name in names]))
        return {name: _about(value) for name, value in zip(names, values, strict=True)}

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _about(value: bytes | None) -> About | None:
    try:
        about = None if value is None else json.loads(value)
    except ValueError:
        log.warning("a heartbeat can't be read")
        return None
    return about if isinstance(about, dict) else None


class Watch:
    """The last look at a registry. While Redis is away, and GRACE_S after, no member counts as dead.

    Being away is an outage, and so is a look that comes so late that this process must have stood still.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._contact_since: float | None = None  # None: the last look failed
        self._looked: float | None = None
        self._silent_since: dict[str, float] = {}
        self.alive: dict[str, About] = {}
        self.outages = 0

    @property
    def in_contact(self) -> bool:
        return self._contact_since is not None

    @property
    def settled(self) -> bool:
        """What the last look did not show is not there."""
        return self._contact_since is not None and self._clock() - self._contact_since >= GRACE_S

    def returned_since(self, outages: int) -> bool:
        """Redis was away since there were so many `outages`, and is back."""
        return self.in_contact and self.outages != outages

    def refresh(self) -> bool:
        """Looks again; False while Redis is away."""
        looked, self._looked = self._looked, self._clock()
        if looked is not None and self._looked - looked > MEMBER_TTL_S:
            self._lose_contact()
        try:
            members = self._registry.members()
        except AWAY:
            self._lose_contact()
            return False
        now = self._clock()
        self.alive = {name: about for name, about in members.items() if about is not None}
        silent = members.keys() - self.alive.keys()
        self._silent_since = {name: self._silent_since.get(name, now) for name in silent}
        if self._contact_since is None:
            is_first_look = looked is None
            self._contact_since = now - (GRACE_S if is_first_look else 0.0)
        return True

    def _lose_contact(self) -> None:
        self.outages += self._contact_since is not None
        self._contact_since = None
        self._silent_since.clear()

    def is_dead(self, name: str, boot: str | None = None) -> bool:
        """`name` is gone, or is another process (`boot`) than the one meant."""
        about = self.alive.get(name)
        if about is not None and (boot is None or about.get("boot") == boot):
            return False
        return self.settled

    def is_gone(self, name: str, patience_s: float) -> bool:
        """`name` left, or has been silent for so long: one that is cut off may come back."""
        if name in self.alive or not self.settled:
            return False
        since = self._silent_since.get(name)
        return since is None or self._clock() - since >= patience_s


class HeartbeatThread:
    """Beats once a second, as long as `about` has something to say; leaves the registry when closed."""

    def __init__(self, registry: Registry, name: str, about: Callable[[], About | None]) -> None:
        self._registry = registry
        self._name = name
        self._about = about
        self._loop = LoopThread("heartbeat", self._beat, AWAY, max_pause_s=BEAT_S)

    def start(self) -> None:
        self._loop.start()

    def beat_now(self) -> None:
        self._loop.wake()

    def close(self) -> None:
        self._loop.close()
        self.leave()

    def leave(self) -> None:
        try:
            self._registry.leave(self._name)
        except AWAY:
            log.warning("could not leave the registry; the heartbeat ends by itself")

    def _beat(self) -> None:
        about = self._about()
        if about is not None:
            self._registry.beat(self._name, about)
        self._loop.pause(BEAT_S)
