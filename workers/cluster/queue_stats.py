"""What an autoscaler wants to know of the queues: length, age of the oldest message, usual wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.cluster.celery_app import BATCH_SUFFIX, PREPROCESS_QUEUE
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import ENCODE_QUEUE, generate_queue, waited_s
from workers.cluster.redis_clock import RedisClock

if TYPE_CHECKING:
    import redis


class QueueStats:
    """Looks at the broker's lists, two to a queue, where the oldest message is the last, and at the waits
    that encode and preprocess workers note in the store. May raise `redis.RedisError`."""

    def __init__(self, client: redis.Redis, store: redis.Redis | None = None) -> None:
        """store: where the ledgers are, if not at the broker."""
        self._client = client
        self._clock = RedisClock(store or client)
        self._ledgers = {name: WorkLedger(store or client, name) for name in (PREPROCESS_QUEUE, ENCODE_QUEUE)}

    def read(self, replicas: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """By queue: `length`, `oldest_age_s` and, of encode and preprocess where known, `wait_ms`."""
        names = [PREPROCESS_QUEUE, ENCODE_QUEUE, *(generate_queue(name) for name in replicas)]
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                for key in (name, name + BATCH_SUFFIX):
                    pipeline.llen(key)
                    pipeline.lindex(key, -1)
            values = iter(pipeline.execute())
        queues = {
            name: {
                "length": float(length + batch),
                "oldest_age_s": max(self._age_s(oldest), self._age_s(oldest_batch)),
            }
            for name, length, oldest, batch, oldest_batch in zip(
                names, values, values, values, values, strict=True
            )
        }
        for name, ledger in self._ledgers.items():
            wait_s = ledger.wait_s()
            if wait_s is not None:
                queues[name]["wait_ms"] = wait_s * 1e3
        return queues

    def _age_s(self, message: bytes | None) -> float:
        return waited_s(json.loads(message)["headers"], self._clock) if message else 0.0
