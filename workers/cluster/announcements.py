"""Waiters for work are woken when it is done. A lost announcement costs no more than the next look."""

from __future__ import annotations

from collections.abc import Callable

import redis.asyncio

from workers.cluster.redis_client import AWAY, AWAY_PAUSE_S
from workers.contract.loops import keep_going


async def listen(url: str, channel: str, wake: Callable[[str], None]) -> None:
    """For ever; `wake` is told the key of each piece of work that ended."""

    async def until_away() -> None:
        async with redis.asyncio.from_url(url) as client, client.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            async for message in pubsub.listen():
                if message["type"] == "message":
                    wake(message["data"].decode())

    await keep_going(f"the listener on {channel}", until_away, AWAY, AWAY_PAUSE_S)
