"""Who is alive: heartbeats in Redis, one registry per kind of member (replica, encoder, node)."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import redis
import redis.exceptions

log = logging.getLogger(__name__)

BEAT_S = 1.0
MEMBER_TTL_S = 5.0
GRACE_S = 3.0  # after Redis was away: members beat again before anybody counts as dead
_FORGET_S = 3600.0

About = Mapping[str, Any]


class Registry:
    """Heartbeats of one kind. Every method may raise `redis.RedisError`."""

    def __init__(self, client: redis.Redis, kind: str) -> None:
        self._client = client
        self._prefix = f"vlm:{kind}"
        self._names = f"vlm:{kind}s"

    def beat(self, name: str, about: About) -> None:
        """`name` is alive for MEMBER_TTL_S from now."""
        with self._client.pipeline() as pipeline:
            pipeline.set(self._key(name), json.dumps(about), px=round(MEMBER_TTL_S * 1000))
            pipeline.zadd(self._names, {name: time.time()})
            pipeline.zremrangebyscore(self._names, "-inf", time.time() - _FORGET_S)
            pipeline.execute()

    def leave(self, name: str) -> None:
        with self._client.pipeline() as pipeline:
            pipeline.delete(self._key(name))
            pipeline.zrem(self._names, name)
            pipeline.execute()

    def alive(self) -> dict[str, About]:
        """What the living said last, by name."""
        found = cast("Iterable[bytes]", self._client.zrange(self._names, 0, -1))
        names = sorted(name.decode() for name in found)
        if not names:
            return {}
        values = cast("list[bytes | None]", self._client.mget([self._key(name) for name in names]))
        return {name: json.loads(value) for name, value in zip(names, values, strict=True) if value}

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


class Watch:
    """The last look at a registry. While Redis is away, and GRACE_S after, nobody counts as dead."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._contact_since: float | None = None  # None: the last look failed
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
        try:
            self.alive = self._registry.alive()
        except (redis.RedisError, OSError):
            self.outages += self._contact_since is not None
            self._contact_since = None
            return False
        if self._contact_since is None:
            first_look = self.outages == 0
            self._contact_since = self._clock() - (GRACE_S if first_look else 0.0)
        return True

    def is_dead(self, name: str, boot: str | None = None) -> bool:
        """`name` is gone, or is another process (`boot`) than the one meant."""
        about = self.alive.get(name)
        if about is not None and (boot is None or about.get("boot") == boot):
            return False
        return self.settled


class HeartbeatThread:
    """Beats once a second, as long as `about` has something to say; leaves the registry when closed."""

    def __init__(self, registry: Registry, name: str, about: Callable[[], About | None]) -> None:
        self._registry = registry
        self._name = name
        self._about = about
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        self._soon.set()

    def close(self) -> None:
        self._stop.set()
        self._soon.set()
        self._thread.join()
        self.leave()

    def leave(self) -> None:
        try:
            self._registry.leave(self._name)
        except (redis.RedisError, OSError):
            log.warning("could not leave the registry; the heartbeat ends by itself")

    def _run(self) -> None:
        away = False
        while not self._stop.is_set():
            try:
                about = self._about()
                if about is not None:
                    self._registry.beat(self._name, about)
                away = False
            except (redis.RedisError, OSError) as error:
                if not away:
                    log.warning("heartbeat failed: %s", error)
                away = True
            self._soon.wait(BEAT_S)
            self._soon.clear()
