"""The one clock of all machines."""

from __future__ import annotations

import redis


class RedisClock:
    """Redis's own time, in seconds since the epoch: one clock for all machines, whatever theirs say."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def now(self) -> float:
        """Raises `redis.RedisError`."""
        seconds, microseconds = self._client.time()
        return seconds + microseconds / 1e6

    def age_s(self, sent_at: float) -> float:
        """Since a time of this clock. Raises `redis.RedisError`."""
        return max(0.0, self.now() - sent_at)
