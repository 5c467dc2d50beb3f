"""The third topology with real processes killed, stopped and starved: nothing lost or answered twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from cluster_processes import ClusterWorker, cluster_worker
from conftest import RedisServer
from direct_cluster import OPTIONS, ask, picture, question, text_of
from waiting import until

from llm.request import Delta, Event, Failed, Finished, SamplingParams
from vlm.build import build_local_pipeline
from vlm.config import DEFAULT_MODEL
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.cluster.names import ENCODE_QUEUE, generate_queue
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.redis_client import connect
from workers.local.preprocess_inline import InlinePreprocess

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]

SPEC = ModelSpec.load(DEFAULT_MODEL)
SMALL = ("--kv-cache-mb", "16")
SHORT = SamplingParams(max_tokens=24)
LONG = SamplingParams(max_tokens=900, ignore_eos=True, temperature=1.0, seed=7)


@contextlib.asynccontextmanager
async def node(url: str, **options: float) -> AsyncIterator[tuple[Pipeline, RemoteEngine]]:
    engine = RemoteEngine(url, url, revision=SPEC.revision, **options)  # type: ignore[arg-type]
    pipeline = Pipeline(SPEC, InlinePreprocess(), engine)
    await pipeline.start()
    try:
        async with asyncio.timeout(60):
            while not engine.ready:
                await asyncio.sleep(0.1)
        yield pipeline, engine
    finally:
        await pipeline.close()


@pytest.fixture
def replica(redis_server: RedisServer) -> Iterator[ClusterWorker]:
    with cluster_worker("generate", redis_server.url, *SMALL) as worker:
        yield worker


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    client = connect(redis_server.url)
    yield client
    client.close()


async def local_answers(seeds: range, params: SamplingParams) -> list[str]:
    """With the workers' own backend: two backends agree to about 1e-5, too little for 900 sampled tokens."""
    local = build_local_pipeline(replace(OPTIONS, backend="auto"))
    await local.start()
    answers = [text_of(await ask(local, f"l{seed}", picture(seed), params)) for seed in seeds]
    await local.close()
    return answers


def num_tokens(events: list[Event]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, Delta))


def test_replica_killed_in_mid_stream_loses_and_doubles_nothing(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        with cluster_worker("generate", url, *SMALL) as a, cluster_worker("generate", url, *SMALL) as b:
            async with node(url) as (pipeline, engine):
                await until(lambda: len(engine.info["replicas"]) == 2)
                received: list[list[Event]] = [[] for _ in range(4)]

                async def stream(number: int) -> None:
                    prepared = pipeline.prepare(f"r{number}", question(picture(number)), LONG)
                    async for event in pipeline.run(prepared):
                        received[number].append(event)

                streams = [asyncio.create_task(stream(number)) for number in range(4)]
                await until(lambda: all(num_tokens(events) > 5 for events in received))
                (victim,) = [w for w in (a, b) if w.name == next(iter(engine._calls.values())).replica]
                victim.kill()
                await asyncio.wait_for(asyncio.gather(*streams), 90)
            assert [num_tokens(events) for events in received] == [900] * 4
            assert all(isinstance(events[-1], Finished) for events in received)
            assert [text_of(events) for events in received] == await local_answers(range(4), LONG)

    asyncio.run(main())


def test_the_only_replica_killed_ends_in_a_clear_error_before_the_deadline(
    redis_server: RedisServer, replica: ClusterWorker
) -> None:
    async def main() -> None:
        async with node(redis_server.url, deadline_s=20.0) as (pipeline, _):
            received: list[Event] = []

            async def stream() -> None:
                prepared = pipeline.prepare("r", question(picture(0)), replace(LONG, max_tokens=1900))
                async for event in pipeline.run(prepared):
                    received.append(event)

            task = asyncio.create_task(stream())
            await until(lambda: num_tokens(received) > 0)
            replica.kill()
            started = time.monotonic()
            await task
            last = received[-1]
            assert isinstance(last, Failed) and last.code in ("engine_died", "request_timeout")
            assert time.monotonic() - started < 22  # its deadline and a margin

    asyncio.run(main())


def test_encode_worker_killed_in_mid_batch_is_followed_by_whoever_is_there(
    redis_server: RedisServer, replica: ClusterWorker, client: redis.Redis
) -> None:
    async def main() -> None:
        async with node(redis_server.url) as (pipeline, engine):
            with cluster_worker("encode", redis_server.url) as encoder:
                await until(lambda: bool(engine.info["encoders"]))
                before = text_of(await ask(pipeline, "warm", picture(9)))
                assert (await engine.stats())["encoder"]["tiles"] == 0 and before
                encoder.signal(signal.SIGSTOP)  # so that the kill comes while it holds the images
                asked = [asyncio.create_task(ask(pipeline, f"r{s}", picture(s))) for s in range(4)]
                await until(lambda: client.llen(ENCODE_QUEUE) + client.hlen("unacked") >= 4)
                encoder.signal(signal.SIGCONT)
                await until(lambda: bool(client.keys(f"vlm:{ENCODE_QUEUE}:lease:*")) or all_done(asked), 10)
                encoder.kill()
                answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
            assert [text_of(events) for events in answers] == await local_answers(
                range(4), SamplingParams(max_tokens=24)
            )

    asyncio.run(main())


def test_encode_worker_killed_among_many_images_of_its_batches_loses_none(
    redis_server: RedisServer, replica: ClusterWorker, client: redis.Redis
) -> None:
    """Stopped when the first of 24 images is through, so that others' tiles are in the step that runs, then
    killed. Its colleague, frozen so far, does what it left: the replica encodes nothing."""

    def names(start: str) -> set[str]:
        return {key.decode().removeprefix(start) for key in client.scan_iter(f"{start}*", count=1000)}

    def leased() -> set[str]:
        return names(f"vlm:{ENCODE_QUEUE}:lease:")

    def through() -> set[str]:
        return names("vlm:visual:")

    async def main() -> None:
        url = redis_server.url
        async with node(url, image_deadline_s=60.0) as (pipeline, engine):
            with cluster_worker("encode", url) as victim, cluster_worker("encode", url) as other:
                await until(lambda: len(engine.info["encoders"]) == 2)
                await freeze(other, client, num_others=2)
                asked = [asyncio.create_task(ask(pipeline, f"r{s}", picture(s), SHORT)) for s in range(24)]
                await until(lambda: bool(through()))
                victim.signal(signal.SIGSTOP)
                held = leased() - through()
                assert len(held) >= 3, "the worker was through before it was stopped"
                victim.kill()
                other.signal(signal.SIGCONT)
                answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
                assert held <= through()
            assert (await engine.stats())["encoder"]["tiles"] == 0
        assert [text_of(events) for events in answers] == await local_answers(range(24), SHORT)
        for events in answers:
            assert sum(isinstance(event, Finished) for event in events) == 1

    asyncio.run(main())


async def freeze(worker: ClusterWorker, client: redis.Redis, num_others: int) -> None:
    """Stops it, and parts it from the queue: else a message that its read was handed waits for it."""

    def reading() -> list[str]:
        return [connection["addr"] for connection in client.client_list() if connection["cmd"] == "brpop"]

    worker.signal(signal.SIGSTOP)
    for address in reading():
        client.client_kill(address)
    await until(lambda: len(reading()) == num_others)  # who runs on comes back


def all_done(tasks: list[asyncio.Task[list[Event]]]) -> bool:
    return all(task.done() for task in tasks)


@pytest.mark.parametrize("outage", ["stopped", "frozen"])
def test_redis_away_for_five_seconds_loses_nothing(
    redis_server: RedisServer, replica: ClusterWorker, outage: str
) -> None:
    async def main() -> None:
        begin, end = {
            "stopped": (redis_server.stop, redis_server.start),
            "frozen": (redis_server.freeze, redis_server.thaw),
        }[outage]
        async with node(redis_server.url) as (pipeline, _):
            running = [asyncio.create_task(ask(pipeline, f"r{s}", picture(s), LONG)) for s in range(2)]
            await asyncio.sleep(0.3)
            await asyncio.to_thread(begin)
            late = [asyncio.create_task(ask(pipeline, f"late{s}", picture(s), LONG)) for s in range(2)]
            await asyncio.sleep(5)
            await asyncio.to_thread(end)
            answers = await asyncio.wait_for(asyncio.gather(*running, *late), 120)
        assert [text_of(events) for events in answers] == 2 * await local_answers(range(2), LONG)
        assert [num_tokens(events) for events in answers] == [900] * 4

    asyncio.run(main())


def test_a_message_delivered_twice_by_the_broker_is_answered_once(
    redis_server: RedisServer, replica: ClusterWorker, client: redis.Redis
) -> None:
    async def main() -> None:
        async with node(redis_server.url) as (pipeline, engine):
            replica.signal(signal.SIGSTOP)
            queue = generate_queue(replica.name)
            # What Redis hands to a frozen worker's blocking read is in no list until that worker goes on.
            for connection in client.client_list():
                if connection["cmd"] == "brpop":
                    client.client_kill(connection["addr"])
            task = asyncio.create_task(ask(pipeline, "r", picture(0), LONG))
            message = await asyncio.wait_for(captured(client, queue), 30)
            client.lpush(queue, message, message)
            replica.signal(signal.SIGCONT)
            events = await asyncio.wait_for(task, 60)
            assert num_tokens(events) == 900
            await until(lambda: client.llen(queue) == 0)
            await asyncio.sleep(2.5)
            stats = (await engine.stats())["engine"]
            assert stats["finished_length"] == 1 and stats["running"] == 0

    asyncio.run(main())


async def captured(client: redis.Redis, queue: str) -> bytes:
    while True:
        if waiting := client.lrange(queue, 0, -1):
            return bytes(waiting[0])
        for entry in client.hvals("unacked"):
            return json.dumps(json.loads(entry)[0]).encode()
        await asyncio.sleep(0.02)


def test_redis_at_its_memory_limit_answers_clearly_and_recovers(
    redis_server: RedisServer, replica: ClusterWorker, client: redis.Redis
) -> None:
    async def main() -> None:
        async with node(redis_server.url, deadline_s=20.0) as (pipeline, _):
            first = text_of(await ask(pipeline, "r", picture(0)))
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 1)
            client.config_set("maxmemory-policy", "noeviction")
            started = time.monotonic()
            try:
                last = (await ask(pipeline, "full", picture(1)))[-1]
                assert isinstance(last, Failed | Finished)
            except Exception as error:
                assert type(error).__name__ == "EngineUnavailable"
            assert time.monotonic() - started < 25
            client.config_set("maxmemory", 0)
            await asyncio.sleep(2)
            assert text_of(await ask(pipeline, "after", picture(0))) == first

    asyncio.run(main())


def test_poison_tiles_that_kill_every_encoder_end_after_three_attempts(
    redis_server: RedisServer, replica: ClusterWorker, client: redis.Redis
) -> None:
    """Whoever begins the poisoned image dies; here its lease is taken by a holder that never beats again."""

    async def main() -> None:
        from workers.cluster.ledger import WorkLedger

        async with node(redis_server.url) as (pipeline, _):
            (image,) = pipeline.prepare("x", question(picture(0)), LONG).images
            name, ledger = f"{image.key}.float32", WorkLedger(client, ENCODE_QUEUE)
            ledger.look(name, "somebody")
            for _attempt in range(3):
                ledger.begin(name, "dies of it", 3)
                client.delete(f"vlm:{ENCODE_QUEUE}:lease:{name}")
            last = (await ask(pipeline, "r", picture(0)))[-1]
            assert isinstance(last, Failed) and last.code == "encode_failed"
            assert isinstance((await ask(pipeline, "s", picture(1)))[-1], Finished)

    asyncio.run(main())


def test_a_stopped_replica_finishes_what_it_has_and_gets_nothing_new(redis_server: RedisServer) -> None:
    async def main() -> None:
        url = redis_server.url
        with cluster_worker("generate", url, *SMALL) as a:
            async with node(url) as (pipeline, engine):
                task = asyncio.create_task(ask(pipeline, "r", picture(0), LONG))
                await until(lambda: any(call.state == "started" for call in engine._calls.values()))
                status = await asyncio.to_thread(a.terminate)
                events = await asyncio.wait_for(task, 60)
                assert status == 0 and num_tokens(events) == 900
                assert next(iter(events)).request_id == "r"
                await until(lambda: not engine.ready)

    asyncio.run(main())


def test_a_hanging_replica_is_left_for_another(redis_server: RedisServer) -> None:
    """A process that exists but says nothing is as good as dead, and its late words are not heard."""

    async def main() -> None:
        url = redis_server.url
        with cluster_worker("generate", url, *SMALL) as a, cluster_worker("generate", url, *SMALL) as b:
            async with node(url) as (pipeline, engine):
                await until(lambda: len(engine.info["replicas"]) == 2)
                task = asyncio.create_task(ask(pipeline, "r", picture(0), LONG))
                await until(lambda: any(call.state == "started" for call in engine._calls.values()))
                (victim,) = [w for w in (a, b) if w.name == next(iter(engine._calls.values())).replica]
                os.killpg(victim.pid, signal.SIGSTOP)
                events = await asyncio.wait_for(task, 60)
                os.killpg(victim.pid, signal.SIGCONT)
                assert num_tokens(events) == 900

    asyncio.run(main())
