"""Machines whose wall clocks are hours apart work together: all times that they share are Redis's own."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kombu.transport.redis
import pytest
import redis
from celery_worker import celery_worker
from cluster_processes import cluster_worker
from conftest import RedisServer
from direct_cluster import ask, picture, text_of
from fake_backend import greedy, prompt_of, request_of
from fake_cluster import FakeReplica, fake_node
from stage_calls import tiles_of

from llm.request import Delta, Finished
from preprocess.limits import ImageLimits
from vlm.config import DEFAULT_MODEL
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.cluster.celery_app import PREPROCESS_QUEUE, make_app, passing_queue
from workers.cluster.members import Registry
from workers.cluster.names import GENERATE_TASK, generate_queue
from workers.cluster.node.preprocess_celery import CeleryPreprocess
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import connect

ROOT = Path(__file__).resolve().parent.parent
HOURS_S = 7200.0
PROMPT = prompt_of([1, 2, 3])

pytestmark = pytest.mark.redis


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """This process's wall clock, so many seconds ahead of what it was."""
    real = time.time
    return lambda shift_s: monkeypatch.setattr(time, "time", lambda: real() + shift_s)


def test_no_worker_and_no_node_reads_its_wall_clock() -> None:
    """But for the transport, which corrects what its library reads."""
    reads = []
    for path in sorted((ROOT / "workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("time_ns", "now", "utcnow", "today"):
                reads += [path.name] if getattr(node.value, "id", "") in ("time", "datetime", "date") else []
            elif isinstance(node, ast.Attribute) and node.attr == "time":
                reads += [path.name] if getattr(node.value, "id", "") == "time" else []
            elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                reads.append(path.name)
    assert reads == ["celery_transport.py"]


@pytest.mark.parametrize("shift_s", [-HOURS_S, HOURS_S])
def test_a_member_whose_clock_is_wrong_forgets_nobody_and_is_not_forgotten(
    client: redis.Redis, set_clock: Callable[[float], None], shift_s: float
) -> None:
    registry = Registry(client, "replica")
    registry.beat("right", {})
    set_clock(shift_s)
    registry.beat("wrong", {})
    set_clock(0.0)
    registry.beat("right", {})
    assert registry.alive().keys() == {"right", "wrong"}


@pytest.mark.parametrize("shift_s", [-HOURS_S, HOURS_S])
def test_a_request_is_as_old_as_redis_says_and_not_as_two_hosts_do(
    redis_url: str, set_clock: Callable[[float], None], shift_s: float
) -> None:
    async def main() -> None:
        replica = FakeReplica("a", redis_url)
        replica.alter = lambda message: set_clock(shift_s)  # it is taken up on another host
        try:
            async with fake_node(redis_url, [replica], deadline_s=20.0) as node:
                events = [event async for event in node.submit(request_of("r", PROMPT))]
                assert isinstance(events[-1], Finished)
                tokens = [token for e in events if isinstance(e, Delta) for token in e.token_ids]
                assert tokens == greedy(PROMPT, 8)
                assert replica.replica._wait_s < 20
        finally:
            set_clock(0.0)
            replica.replica.close()

    asyncio.run(main())


def test_a_late_request_is_known_as_late(redis_url: str) -> None:
    async def main() -> None:
        replica = FakeReplica("a", redis_url)
        try:
            async with fake_node(redis_url, [replica]) as node:
                assert [event async for event in node.submit(request_of("r", PROMPT))]
                message = json.loads(replica.taken[0])
                late = {**message, "call": "late", "sent_at": message["sent_at"] - message["deadline_s"]}
                await asyncio.to_thread(replica.deliver(json.dumps(late)).join)
                assert not node._mailbox._client.exists("vlm:started:late")
        finally:
            replica.replica.close()

    asyncio.run(main())


@pytest.mark.parametrize("shift_s", [-HOURS_S, HOURS_S])
def test_an_autoscaler_sees_ages_on_redis_own_clock(
    redis_url: str, client: redis.Redis, set_clock: Callable[[float], None], shift_s: float
) -> None:
    async def main() -> None:
        set_clock(shift_s)  # of the node that sends
        stage = CeleryPreprocess(redis_url, redis_url)
        await stage.start()
        spec = ModelSpec.load(DEFAULT_MODEL).preprocess
        task = asyncio.create_task(tiles_of(stage, picture(0), spec, ImageLimits(), deadline_s=60))
        while not client.llen(PREPROCESS_QUEUE):
            await asyncio.sleep(0.01)
        set_clock(0.0)
        await asyncio.sleep(0.01)
        assert 0 < QueueStats(client).read([])[PREPROCESS_QUEUE]["oldest_age_s"] < HOURS_S / 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stage.close()

    asyncio.run(main())


@pytest.mark.parametrize("shift_s", [-HOURS_S, HOURS_S])
def test_a_worker_whose_clock_is_wrong_gives_no_others_messages_back(
    redis_url: str,
    client: redis.Redis,
    set_clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    shift_s: float,
) -> None:
    """Whose are in hand for less than the visibility timeout; after it anybody does."""
    monkeypatch.setattr(kombu.transport.redis, "time", lambda: time.time())
    name = generate_queue("a")
    with make_app(redis_url) as app, app.connection_for_read() as connection:
        app.send_task(GENERATE_TASK, kwargs={}, queue=passing_queue(name))
        channel = connection.channel()

        def look() -> int:
            for _ in range(20):  # it looks at every tenth call
                channel.qos.restore_visible()
            return int(client.llen(name))

        with channel.Consumer([passing_queue(name)], accept=["json"], callbacks=[lambda *_: None]):
            set_clock(shift_s)
            connection.drain_events(timeout=5)
        for other_host in (-shift_s, 0.0, shift_s):
            set_clock(other_host)
            assert look() == 0 and client.hlen("unacked") == 1
        client.zadd("unacked_index", dict.fromkeys(client.hkeys("unacked"), client.time()[0] - 3601))
        assert look() == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_whose_clocks_are_hours_apart_serve_every_request(redis_server: RedisServer) -> None:
    url, spec = redis_server.url, ModelSpec.load(DEFAULT_MODEL)
    turns = itertools.count()

    def in_turn(key: str, loads: Mapping[str, float]) -> str:
        return sorted(loads)[next(turns) % len(loads)]

    async def main() -> None:
        engine = RemoteEngine(url, url, revision=spec.revision, router=in_turn, deadline_s=60.0)
        pipeline = Pipeline(spec, CeleryPreprocess(url, url), engine)
        await pipeline.start()
        try:
            async with asyncio.timeout(90):
                while len(engine.info["replicas"]) < 2 or not engine.info["encoders"]:
                    await asyncio.sleep(0.1)
            answers = await asyncio.gather(*(ask(pipeline, f"r{n}", picture(n // 2)) for n in range(12)))
            assert all(isinstance(events[-1], Finished) and text_of(events) for events in answers)
            pairs: Any = zip(answers[::2], answers[1::2], strict=True)  # one image, one by each replica
            assert all(text_of(one) == text_of(other) for one, other in pairs)
            for _ in range(20):  # nobody forgets anybody
                assert len(engine.info["replicas"]) == 2 and len(engine.info["encoders"]) == 1
                await asyncio.sleep(0.1)
            queues = (await engine.stats())["queues"]
            assert all(queue.get("wait_ms", 0.0) < 1e3 * HOURS_S / 2 for queue in queues.values())
        finally:
            await pipeline.close()

    small = ("--kv-cache-mb", "16")
    with (
        celery_worker(url, clock_shift_s=HOURS_S),
        cluster_worker("encode", url, clock_shift_s=-HOURS_S),
        cluster_worker("generate", url, *small, "--name", "ahead", clock_shift_s=HOURS_S),
        cluster_worker("generate", url, *small, "--name", "behind", clock_shift_s=-HOURS_S),
    ):
        asyncio.run(main())
