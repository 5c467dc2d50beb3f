"""What stays behind in the third topology once nobody wants it, and what monitors see of the rest."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis
from celery_worker import celery_worker
from cluster_processes import cluster_worker
from conftest import RedisServer
from direct_cluster import ask, picture, text_of
from stage_calls import tiles_of

from llm.request import Delta, Prompt, Request
from vlm.config import DEFAULT_MODEL
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.cluster.celery_app import PASSING_S, PREPROCESS_QUEUE, TILES_TASK, make_app, passing_queue
from workers.cluster.names import ENCODE_QUEUE, ENCODE_TASK, GENERATE_TASK, SENT_HEADER, generate_queue
from workers.cluster.node.preprocess_celery import CeleryPreprocess
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import connect

pytestmark = pytest.mark.redis

SEPARATOR = b"\x06\x16"  # before the priority in the name of one of a queue's lists


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.mark.parametrize("turns", range(6))
def test_a_request_cancelled_as_an_event_comes_is_cancelled(redis_url: str, turns: int) -> None:
    """Whichever turn of the loop the cancellation falls into: `asyncio.wait_for` loses it in one of them."""

    async def main() -> None:
        engine = RemoteEngine(redis_url, redis_url)
        call = engine._new_call(Request("r", Prompt((1, 2, 3))))

        async def read() -> None:
            while True:
                await engine._next(call)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        call.events.put_nowait(Delta("r", 0, (1,), "a", ()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        cancelled = task.cancelled()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.01)
        assert cancelled

    asyncio.run(main())


def test_the_queue_of_a_replica_that_is_gone_ends(redis_url: str, client: redis.Redis) -> None:
    """With messages that it took and never acknowledged, and with its binding."""
    name = generate_queue("gone")
    with make_app(redis_url) as app:
        for _ in range(3):
            app.send_task(GENERATE_TASK, kwargs={}, queue=passing_queue(name))
        assert 0 < client.ttl(name) <= PASSING_S
        with app.connection_for_read() as connection:
            channel = connection.channel()
            consumer = channel.Consumer([passing_queue(name)], accept=["json"], callbacks=[lambda *_: None])
            with consumer:
                connection.drain_events(timeout=5)
            deadlines = client.zrange("_kombu.binding_deadlines", 0, -1, withscores=True)
            assert name.encode() in dict(deadlines)
            client.delete(name)  # as if its time were up, while one message is still unacknowledged
            assert client.hlen("unacked") == 1
            client.zadd("unacked_index", dict.fromkeys(client.hkeys("unacked"), 0))
            for _ in range(20):  # it looks at every tenth call
                channel.qos.restore_visible()
    assert client.llen(name) == 1 and 0 < client.ttl(name) <= PASSING_S


def test_images_in_the_queue_say_since_when(redis_url: str, client: redis.Redis) -> None:
    """So that an autoscaler sees the age of the oldest."""
    from preprocess.limits import ImageLimits

    async def main() -> None:
        stage = CeleryPreprocess(redis_url, redis_url)
        await stage.start()
        spec = ModelSpec.load(DEFAULT_MODEL).preprocess
        task = asyncio.create_task(tiles_of(stage, picture(0), spec, ImageLimits(), deadline_s=20))
        while not client.llen(PREPROCESS_QUEUE):
            await asyncio.sleep(0.01)
        sent_at = json.loads(client.lindex(PREPROCESS_QUEUE, -1))["headers"][SENT_HEADER]
        assert 0 <= time.time() - sent_at < 20
        assert QueueStats(client).read([])[PREPROCESS_QUEUE]["oldest_age_s"] > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stage.close()

    asyncio.run(main())


class Monitor(threading.Thread):
    """Celery's events as they come, as Flower and `celery events` read them."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._receiver: Any = None
        self.seen: Counter[str] = Counter()
        self.tasks: dict[str, str] = {}

    def run(self) -> None:
        with make_app(self._url) as app, app.connection() as connection:
            self._receiver = app.events.Receiver(connection, handlers={"*": self._take})
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def close(self) -> None:
        self._receiver.should_stop = True
        self.join(10)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "task-received":
            self.tasks[event["uuid"]] = event["name"]
        kind = event["type"]
        self.seen[f"{self.tasks.get(event.get('uuid', ''), '')} {kind}".strip()] += 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_monitors_see_every_worker_and_task(redis_server: RedisServer) -> None:
    url = redis_server.url
    spec = ModelSpec.load(DEFAULT_MODEL)

    async def answer() -> str:
        engine = RemoteEngine(url, url, revision=spec.revision)
        pipeline = Pipeline(spec, CeleryPreprocess(url, url), engine)
        await pipeline.start()
        async with asyncio.timeout(60):
            while not (engine.ready and engine.info["encoders"]):
                await asyncio.sleep(0.05)
        events = await ask(pipeline, "r", picture(0))
        await pipeline.close()
        return text_of(events)

    with (
        make_app(url) as app,
        celery_worker(url),
        cluster_worker("encode", url),
        cluster_worker("generate", url, "--name", "a", "--kv-cache-mb", "16"),
    ):
        seen_by = Monitor(url)
        seen_by.start()
        try:
            watch(app, url, seen_by, answer)
        finally:
            seen_by.close()


def watch(app: Any, url: str, monitor: Monitor, answer: Callable[[], Coroutine[Any, Any, str]]) -> None:
    end = time.monotonic() + 60
    queues: dict[str, Any] = {}
    while len(queues) < 3:  # a worker beats before it reads its queue
        assert time.monotonic() < end
        queues = app.control.inspect(timeout=2.0).active_queues() or {}
    assert {queue["name"] for per_worker in queues.values() for queue in per_worker} == {
        PREPROCESS_QUEUE,
        ENCODE_QUEUE,
        generate_queue("a"),
    }
    assert asyncio.run(answer())
    wanted = {f"{task} task-succeeded" for task in (TILES_TASK, ENCODE_TASK, GENERATE_TASK)}
    while not (wanted <= monitor.seen.keys() and monitor.seen["worker-heartbeat"] >= 3):
        assert time.monotonic() < end, monitor.seen
        time.sleep(0.1)
    client = connect(url)
    waits = QueueStats(client).read(["a"])
    client.close()
    assert waits[PREPROCESS_QUEUE]["wait_ms"] > 0 and waits[ENCODE_QUEUE]["wait_ms"] > 0
