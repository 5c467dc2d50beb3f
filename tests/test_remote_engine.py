"""An API node and its replicas: equal answers, one encode for all, and what happens when somebody is gone."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
import torch
from direct_cluster import OPTIONS, DirectReplica, ask, node, picture, question, replicas, text_of
from PIL import Image
from waiting import until

from llm.request import Delta, Failed, Finished, Prompt, Request, RequestError, SamplingParams
from preprocess.stage import preprocess
from preprocess.wire import to_bytes
from vlm.api.observe.metrics import Metrics
from vlm.build import build_local_pipeline, build_runner
from vlm.config import DEFAULT_MODEL
from vlm.spec import ModelSpec
from workers.cluster.blobs import open_store
from workers.cluster.ledger import LEASE_S, WorkLedger
from workers.cluster.members import BEAT_S, GRACE_S, Registry, Watch
from workers.cluster.names import ENCODE_QUEUE, NODE, REPLICA, GenerateJob
from workers.cluster.node.remote_engine import RemoteEngine
from workers.cluster.node.stored_tiles import StoredTiles
from workers.cluster.redis_client import connect
from workers.contract.engine_client import EngineUnavailable
from workers.contract.stages import deadline_passed
from workers.local.engine_runner import EngineRunner
from workers.local.preprocess_inline import InlinePreprocess

pytestmark = [pytest.mark.redis, pytest.mark.slow]

LONG = SamplingParams(max_tokens=300, ignore_eos=True)
SPEC = ModelSpec.load(DEFAULT_MODEL)


@pytest.fixture
def pair(redis_url: str) -> Iterator[list[DirectReplica]]:
    with replicas(redis_url, "a", "b") as made:
        yield made


@pytest.fixture
def one(redis_url: str) -> Iterator[list[DirectReplica]]:
    with replicas(redis_url, "a") as made:
        yield made


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


def on_runner(direct: DirectReplica, function: Callable[[EngineRunner], object]) -> object:
    return direct.replica._thread.ask(function, 30)


def test_answers_and_counts_are_those_of_the_engine_in_process(
    redis_url: str, pair: list[DirectReplica]
) -> None:
    async def main() -> None:
        local = build_local_pipeline(OPTIONS)
        await local.start()
        async with node(redis_url, pair, SPEC) as (pipeline, _):
            for seed in range(40):
                if seed >= 4 and all(direct.taken for direct in pair):
                    break  # whose image it is depends on a digest: some go to both soon
                for again in range(2):
                    params = SamplingParams(max_tokens=24, temperature=0.8, seed=seed, n=2)
                    there = await ask(pipeline, f"r{seed}{again}", picture(seed), params)
                    here = await ask(local, f"r{seed}{again}", picture(seed), params)
                    for choice in range(2):
                        assert text_of(there, choice) == text_of(here, choice) != ""
                    assert there[-1].usage == here[-1].usage  # type: ignore[union-attr]
                    assert {event.request_id for event in there} == {f"r{seed}{again}"}
        await local.close()
        assert all(direct.taken for direct in pair)  # both had some of the images

    asyncio.run(main())


def test_questions_about_one_image_go_to_one_replica_and_find_its_prefix(
    redis_url: str, pair: list[DirectReplica]
) -> None:
    async def main() -> None:
        async with node(redis_url, pair, SPEC) as (pipeline, _):
            for number in range(3):
                last = (await ask(pipeline, f"r{number}", picture(0)))[-1]
                assert isinstance(last, Finished) and last.usage is not None
                assert (last.usage.cached_tokens > 0) == (number > 0)
        assert sorted(len(direct.taken) for direct in pair) == [0, 3]

    asyncio.run(main())


def test_level_2_serves_every_replica_and_outlives_them(redis_url: str) -> None:
    async def main() -> None:
        with replicas(redis_url, "first") as made:
            async with node(redis_url, made, SPEC) as (pipeline, _):
                before = await ask(pipeline, "r", picture(0))
                await until(lambda: bool(open_store(redis_url, prefix="vlm:visual").used_bytes()))
        with replicas(redis_url, "second") as made:
            async with node(redis_url, made, SPEC) as (pipeline, _):
                after = await ask(pipeline, "r", picture(0))
                assert text_of(after) == text_of(before)
                stats = on_runner(made[0], lambda runner: runner.stats())
                assert stats["encoder"]["tiles"] == 0  # type: ignore[index]
                assert made[0].replica._visuals.level2_hits == 1

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_entry_of_level_2_is_made_anew(redis_url: str, client: redis.Redis, damage: str) -> None:
    async def main() -> None:
        with replicas(redis_url, "first") as made:
            async with node(redis_url, made, SPEC) as (pipeline, _):
                before = await ask(pipeline, "r", picture(0))
                await until(lambda: bool(client.keys("vlm:visual:*")))
        (name,) = client.keys("vlm:visual:*")
        value = bytearray(client.get(name))
        value[-1] ^= 1
        client.set(name, bytes(value) if damage == "flipped" else bytes(value)[:-4])
        with replicas(redis_url, "second") as made:
            async with node(redis_url, made, SPEC) as (pipeline, _):
                assert text_of(await ask(pipeline, "r", picture(0))) == text_of(before)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["cache", "tiles"])
def test_what_is_kept_under_an_images_key_and_is_not_its_own_is_made_anew(
    redis_url: str, one: list[DirectReplica], where: str
) -> None:
    """Visual tokens of another number in the replica's cache, tiles of another grid in the store."""

    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, engine):
            before = text_of(await ask(pipeline, "r", picture(0)))
            on_runner(one[0], lambda runner: runner.clear_cache())
            (image,) = pipeline.prepare("x", question(picture(0)), LONG).images
            wrong = preprocess(picture(0), SPEC.preprocess_spec("low"))
            assert wrong.grid != image.grid
            level2 = open_store(redis_url, prefix="vlm:visual")
            await until(lambda: level2.exists(f"{image.key}.float32"))
            level2.delete(f"{image.key}.float32")
            if where == "cache":
                rows = torch.zeros(image.num_tokens + 1, one[0].replica._info["visual_width"])
                on_runner(one[0], lambda runner: runner.put_visual(image.key, rows))
            else:
                put = engine._visuals._blobs.put

                def overwritten(key: str, data: bytes, ttl_s: float) -> None:
                    put(key, to_bytes(wrong), ttl_s)  # by a node of another version
                    engine._visuals._blobs.put = put  # type: ignore[method-assign]

                engine._visuals._blobs.put = overwritten  # type: ignore[method-assign,assignment]
            assert text_of(await ask(pipeline, "again", picture(0))) == before
            await until(lambda: level2.exists(f"{image.key}.float32"))

    asyncio.run(main())


@pytest.mark.parametrize("is_lost", [False, True])
def test_tiles_that_are_in_the_store_already_are_read_from_there_and_not_sent_again(
    redis_url: str, one: list[DirectReplica], is_lost: bool
) -> None:
    """Lost before an encoder has them, they are made once more."""

    class InStore(InlinePreprocess):
        made = closed = 0

        async def tiles(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            made = await super().tiles(*arguments, **keywords)
            store.put("tiles:theirs", made.wire(), 60)
            InStore.made += 1
            if is_lost and InStore.made == 1:
                store.delete("tiles:theirs")
            return StoredTiles(store, redis_url, "tiles:theirs", made.grid, self.note_closed)

        def note_closed(self) -> None:
            InStore.closed += 1

    store = open_store(redis_url)

    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, engine):
            pipeline.preprocess = InStore()
            put: list[str] = []
            engine._visuals._blobs.put = lambda key, *_: put.append(key)  # type: ignore[method-assign]
            assert isinstance((await ask(pipeline, "r", picture(0)))[-1], Finished)
            await until(lambda: InStore.closed == InStore.made)
            assert InStore.made == 1 + is_lost and not put

    asyncio.run(main())
    store.close()


def test_a_failure_of_one_node_is_not_anothers(redis_url: str, one: list[DirectReplica]) -> None:
    """Both nodes' requests wait at one replica for one image; one node can't get its tiles made."""

    class Away(InlinePreprocess):
        async def tiles(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            await both.wait()
            raise deadline_passed()

    class Slow(InlinePreprocess):
        async def tiles(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            await failed.wait()
            return await super().tiles(*arguments, **keywords)

    both, failed = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        async with node(redis_url, one, SPEC) as (first, _), node(redis_url, one, SPEC) as (second, _):
            first.preprocess, second.preprocess = Away(), Slow()
            asked = [asyncio.create_task(ask(p, f"r{i}", picture(0))) for i, p in enumerate((first, second))]
            visuals = one[0].replica._visuals
            await until(lambda: any(len(want.calls) == 2 for want in visuals._wants.values()))
            both.set()
            (last,) = await asked[0]
            assert isinstance(last, Failed) and last.code == "preprocessing_timeout"
            failed.set()
            assert isinstance((await asked[1])[-1], Finished)
            first.preprocess = InlinePreprocess()
            assert isinstance((await ask(first, "again", picture(0)))[-1], Finished)

    asyncio.run(main())


def test_two_nodes_that_ask_at_once_cause_one_encode(redis_url: str, pair: list[DirectReplica]) -> None:
    """The nodes route to different replicas, so that only the ledger can bring them together."""

    async def main() -> None:
        async with (
            node(redis_url, pair, SPEC, router=lambda key, loads: "a") as (first, _),
            node(redis_url, pair, SPEC, router=lambda key, loads: "b") as (second, _),
        ):
            answers = await asyncio.gather(
                *(ask(pipeline, f"r{i}", picture(3)) for i, pipeline in enumerate((first, second) * 2))
            )
            assert len({text_of(events) for events in answers}) == 1
        tiles = [on_runner(d, lambda runner: runner.stats())["encoder"]["tiles"] for d in pair]  # type: ignore[index]
        size = Image.open(io.BytesIO(picture(3))).size
        assert sum(tiles) == SPEC.preprocess.rule.grid(*size).num_tiles

    asyncio.run(main())


def test_a_waiter_takes_over_when_the_holder_of_the_encode_lease_dies(
    redis_url: str, client: redis.Redis, one: list[DirectReplica]
) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, _):
            (image,) = pipeline.prepare("x", question(picture(0)), LONG).images
            ledger = WorkLedger(client, ENCODE_QUEUE)
            name = f"{image.key}.float32"
            ledger.look(name, "somebody")
            assert ledger.begin(name, "a holder that never beats", 3) == "begun"
            started = time.monotonic()
            assert isinstance((await ask(pipeline, "r", picture(0)))[-1], Finished)
            assert time.monotonic() - started > LEASE_S / 2  # it did wait for the holder

    asyncio.run(main())


def test_closing_the_stream_frees_the_replica(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, _):
            async with contextlib.aclosing(
                pipeline.run(pipeline.prepare("r", question(picture(0)), LONG))
            ) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.text:
                        break
            await until(lambda: on_runner(one[0], lambda runner: runner.engine.is_idle) is True)
            await until(lambda: not one[0].replica._calls)
            on_runner(one[0], lambda runner: runner.check_integrity())

    asyncio.run(main())


def test_what_can_never_be_served_is_refused_as_by_a_local_engine(
    redis_url: str, one: list[DirectReplica]
) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (_, engine):
            with pytest.raises(RequestError) as caught:
                async for _event in engine.submit(Request("r", Prompt((10**9,)))):
                    pass
            assert (caught.value.code, caught.value.param) == ("invalid_prompt", "messages")

    asyncio.run(main())


def test_a_message_that_comes_twice_is_answered_once(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, _):
            deliver = one[0].deliver
            one[0].deliver = lambda text: (deliver(text), deliver(text))[1]  # type: ignore[method-assign]
            before = await ask(pipeline, "r", picture(0))
            one[0].deliver = deliver  # type: ignore[method-assign]
            assert len(one[0].taken) == 2
            late = deliver(one[0].taken[0])  # redelivered after the answer
            await asyncio.to_thread(late.join)
            assert text_of(before) == text_of(await ask(pipeline, "s", picture(0)))
            stats = on_runner(one[0], lambda runner: runner.stats())
            assert stats["engine"]["finished_stop"] == 2  # type: ignore[index]

    asyncio.run(main())


def test_a_message_redelivered_to_a_node_that_says_nothing_is_not_begun_again(
    redis_url: str, one: list[DirectReplica]
) -> None:
    """The mark alone holds it back: no cancel, and the first answer has ended."""

    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, _):
            await ask(pipeline, "r", picture(0))
            message = json.dumps({**json.loads(one[0].taken[0]), "call": "again", "sent_at": time.time()})
            for _ in range(3):
                await asyncio.to_thread(one[0].deliver(message).join)
            stats = on_runner(one[0], lambda runner: runner.stats())
            assert stats["engine"]["finished_stop"] == 2  # type: ignore[index]

    asyncio.run(main())


def test_a_late_message_is_not_begun(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, _):
            await ask(pipeline, "r", picture(0))
            message = json.loads(one[0].taken[0])
            late = {**message, "call": "late", "sent_at": message["sent_at"] - message["deadline_s"]}
            await asyncio.to_thread(one[0].deliver(json.dumps(late)).join)
            stats = on_runner(one[0], lambda runner: runner.stats())
            assert stats["engine"]["finished_stop"] == 1  # type: ignore[index]

    asyncio.run(main())


def test_a_replica_that_dies_in_mid_stream_is_replaced_without_a_seam(
    redis_url: str, client: redis.Redis, pair: list[DirectReplica]
) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0)  # no seed given
        async with node(redis_url, pair, SPEC) as (pipeline, _):
            received = []
            async for event in pipeline.run(pipeline.prepare("r", question(picture(0)), params)):
                received.append(event)
                if len([e for e in received if isinstance(e, Delta)]) == 3 and len(received) < 50:
                    (victim,) = [direct for direct in pair if direct.replica._calls]
                    victim.replica._publisher.close()  # as dead as a process can be inside ours
                    victim.replica._heartbeat.close()
            assert isinstance(received[-1], Finished)
            tokens = [t for e in received if isinstance(e, Delta) for t in e.token_ids]
            assert len(tokens) == 200
            assert [len(direct.taken) for direct in pair] == [1, 1]
            seeds = [json.loads(direct.taken[0])["request"]["params"]["seed"] for direct in pair]
            assert seeds[0] == seeds[1] is not None
            whole = replace(params, seed=seeds[0])
            assert text_of(await ask(pipeline, "again", picture(0), whole)) == text_of(received)

    asyncio.run(main())


def test_requests_of_a_node_that_is_gone_are_cancelled(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        endless = SamplingParams(max_tokens=1500, ignore_eos=True)
        async with node(redis_url, one, SPEC) as (pipeline, engine):
            running = asyncio.create_task(ask(pipeline, "r", picture(0), endless))
            await until(lambda: bool(one[0].replica._calls))
            engine._heartbeat.close()
            await until(lambda: not one[0].replica._calls)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


class HeldEncoder:
    """A runner whose encodes wait until they may go on."""

    def __init__(self) -> None:
        self.runner = build_runner(OPTIONS)
        self.started, self.go = threading.Event(), threading.Event()
        encode = self.runner._batcher._encode

        def held(images: Any) -> Any:
            self.started.set()
            self.go.wait(120)
            return encode(images)

        self.runner._batcher._encode = held


@contextlib.contextmanager
def held_replica(url: str, stall_s: float) -> Iterator[tuple[DirectReplica, HeldEncoder]]:
    held = HeldEncoder()
    direct = DirectReplica("a", url, held.runner, stall_s)
    try:
        yield direct, held
    finally:
        held.go.set()
        direct.replica.close()


def test_an_encode_may_take_longer_than_an_image_may_wait_for_it_to_begin(redis_url: str) -> None:
    async def main() -> None:
        with held_replica(redis_url, stall_s=600.0) as (direct, held):
            async with node(redis_url, [direct], SPEC, image_deadline_s=1.0) as (pipeline, engine):
                asked = asyncio.create_task(ask(pipeline, "r", picture(0)))
                await until(held.started.is_set)
                await asyncio.sleep(3.0)
                assert not asked.done() and engine.ready
                held.go.set()
                assert isinstance((await asyncio.wait_for(asked, 60))[-1], Finished)

    asyncio.run(main())


def test_a_replica_that_hangs_is_found_and_leaves_for_good(redis_url: str, client: redis.Redis) -> None:
    """Its heartbeat comes from another thread than the one that hangs."""

    async def main() -> None:
        with held_replica(redis_url, stall_s=1.0) as (direct, held):
            async with node(redis_url, [direct], SPEC) as (pipeline, engine):
                asked = asyncio.create_task(ask(pipeline, "r", picture(0)))
                await until(held.started.is_set)
                await until(direct.crashed.is_set)
                await until(lambda: not engine.ready)
                await asyncio.sleep(2.5 * BEAT_S)
                assert not Registry(client, REPLICA).alive() and not engine.ready
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(main())


def test_without_replicas_it_is_not_ready_and_says_so_at_once(redis_url: str) -> None:
    async def main() -> None:
        async with node(redis_url, [], SPEC) as (pipeline, engine):
            assert not engine.ready
            started = time.monotonic()
            with pytest.raises(EngineUnavailable):
                await ask(pipeline, "r", picture(0))
            assert time.monotonic() - started < 5

    asyncio.run(main())


def test_replicas_of_another_encoder_get_nothing(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC, revision="another") as (pipeline, engine):
            assert not engine.ready
            with pytest.raises(EngineUnavailable):
                await ask(pipeline, "r", picture(0))

    asyncio.run(main())


def test_draining_replicas_get_nothing_new(redis_url: str, pair: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, pair, SPEC) as (pipeline, engine):
            pair[0].replica.drain()
            await until(lambda: bool(engine._replicas.alive["a"]["draining"]))
            for seed in range(4):
                await ask(pipeline, f"r{seed}", picture(seed))
            assert not pair[0].taken and len(pair[1].taken) == 4

    asyncio.run(main())


def test_a_deadline_holds_when_a_replica_takes_nothing(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC, deadline_s=1.0) as (pipeline, _):
            one[0].deliver = lambda text: None  # type: ignore[method-assign,assignment,return-value]
            (last,) = await ask(pipeline, "r", picture(0))
            assert isinstance(last, Failed) and last.code == "request_timeout"

    asyncio.run(main())


def test_a_message_lost_with_redis_is_sent_until_it_gets_through(
    redis_url: str, one: list[DirectReplica]
) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC, deadline_s=30.0) as (pipeline, engine):
            deliver, tries = one[0].deliver, 0

            def lossy(text: str) -> object:
                nonlocal tries
                tries += 1
                if tries == 1:
                    engine._replicas.outages += 1  # Redis goes away and forgets the message
                elif tries < 4:
                    raise redis.ConnectionError
                else:
                    return deliver(text)
                return None

            one[0].deliver = lossy  # type: ignore[method-assign,assignment]
            assert text_of(await ask(pipeline, "r", picture(0))) and tries == 4

    asyncio.run(main())


def test_a_full_store_fails_the_image_clearly(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, engine):
            engine._visuals._blobs = open_store(redis_url, cap_bytes=100)
            (last,) = await ask(pipeline, "r", picture(0))
            assert isinstance(last, Failed) and last.code == "preprocessing_overloaded"

    asyncio.run(main())


def test_nobody_counts_as_dead_while_redis_is_away(client: redis.Redis) -> None:
    now = [0.0]
    registry = Registry(client, REPLICA)
    watch = Watch(registry, lambda: now[0])
    registry.beat("a", {"boot": "1"})
    assert watch.refresh() and not watch.is_dead("a", "1")
    assert watch.is_dead("a", "2") and watch.is_dead("b")
    broken = Watch(Registry(connect("redis://127.0.0.1:1/0"), NODE), lambda: now[0])
    assert not broken.refresh() and not broken.is_dead("a")
    away = watch._registry
    watch._registry = broken._registry
    assert not watch.refresh() and not watch.is_dead("b")
    registry.leave("a")
    watch._registry = away
    assert watch.refresh() and not watch.is_dead("a", "1")  # it may still come back
    now[0] += GRACE_S
    assert watch.is_dead("a", "1")


def test_a_watcher_whose_first_look_fell_into_an_outage_gives_the_others_time_to_beat_again(
    client: redis.Redis,
) -> None:
    now = [0.0]
    watch = Watch(Registry(connect("redis://127.0.0.1:1/0"), REPLICA), lambda: now[0])
    assert not watch.refresh()
    watch._registry = Registry(client, REPLICA)
    assert watch.refresh() and not watch.is_dead("a")
    now[0] += GRACE_S
    assert watch.refresh() and watch.is_dead("a")


def test_a_watcher_that_stood_still_counts_nobody_as_dead_at_once(client: redis.Redis) -> None:
    """Its machine was suspended, and the members' too."""
    now = [0.0]
    watch = Watch(Registry(client, REPLICA), lambda: now[0])
    assert watch.refresh() and watch.is_dead("a")
    now[0] += 60.0
    assert watch.refresh() and not watch.is_dead("a")
    now[0] += GRACE_S
    assert watch.refresh() and watch.is_dead("a")


def test_queue_lengths_and_ages_are_there_for_an_autoscaler(redis_url: str, one: list[DirectReplica]) -> None:
    async def main() -> None:
        async with node(redis_url, one, SPEC) as (pipeline, engine):
            await ask(pipeline, "r", picture(0))
            message = GenerateJob(**json.loads(one[0].taken[0]))
            for sent_at in (message.sent_at - 60, message.sent_at):
                RemoteEngine._send_task(engine, "generate.a", replace(message, sent_at=sent_at))
            stats = await engine.stats()
            queue = stats["queues"]["generate.a"]
            assert queue["length"] == 2 and queue["oldest_age_s"] >= 60 and queue["wait_ms"] >= 0
            assert stats["queues"]["encode"]["length"] == stats["queues"]["preprocess"]["length"] == 0
            metrics = Metrics()
            metrics.engine.stats = stats
            assert b'vlm_queue_length{queue="generate.a"} 2.0' in metrics.render()

    asyncio.run(main())
