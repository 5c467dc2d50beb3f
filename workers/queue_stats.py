"""What an autoscaler wants to know of the queues: length, and the age of the oldest message."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.celery_app import PREPROCESS_QUEUE
from workers.cluster import ENCODE_QUEUE, SENT_HEADER, generate_queue

if TYPE_CHECKING:
    import redis


class QueueStats:
    """Looks at the broker's lists, where the oldest message is the last. May raise `redis.RedisError`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def read(self, replicas: Sequence[str]) -> dict[str, dict[str, float]]:
        names = [PREPROCESS_QUEUE, ENCODE_QUEUE, *(generate_queue(name) for name in replicas)]
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.llen(name)
                pipeline.lindex(name, -1)
            values = pipeline.execute()
        return {
            name: {"length": float(length), "oldest_age_s": _age_s(oldest)}
            for name, length, oldest in zip(names, values[::2], values[1::2], strict=True)
        }


def _age_s(message: bytes | None) -> float:
    """0 for no message, and for one that does not say when it was sent."""
    sent_at = json.loads(message)["headers"].get(SENT_HEADER) if message else None
    return max(0.0, time.time() - sent_at) if isinstance(sent_at, float) else 0.0
