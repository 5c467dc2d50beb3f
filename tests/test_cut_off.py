"""A node that can't reach Redis for a while, or stands still, finds its answers where it left them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from cluster_processes import ROOT, cluster_worker
from conftest import RedisServer
from fake_backend import greedy, prompt_of, request_of
from fake_cluster import FakeNode, FakeReplica, fake_node
from redis_proxy import RedisProxy, redis_proxy
from waiting import until

from llm.request import Delta, Event, Finished
from workers.cluster import members as registry
from workers.cluster.event_stream import stream_name
from workers.cluster.redis_client import connect
from workers.cluster.worker import replica as replica_module

pytestmark = pytest.mark.redis

PROMPT = prompt_of([1, 2, 3])
TTL_S = 0.6
NUM_TOKENS = 60
ANSWER = greedy(PROMPT, NUM_TOKENS)


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    client = connect(redis_server.url)
    yield client
    client.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[RedisProxy]:
    with redis_proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats in a tenth of their time."""
    for name, seconds in (("BEAT_S", 0.1), ("MEMBER_TTL_S", TTL_S), ("GRACE_S", 0.3)):
        monkeypatch.setattr(registry, name, seconds)
    monkeypatch.setattr(replica_module, "_STATS_S", 0.1)
    monkeypatch.setattr("workers.cluster.redis_client.SOCKET_TIMEOUT_S", 0.3)


@pytest.fixture
def replica(redis_server: RedisServer, quick: None) -> Iterator[FakeReplica]:
    made = FakeReplica("a", redis_server.url)
    yield made
    made.hold_after = None
    made.replica.close()


async def answer(node: FakeNode, seen: list[Event]) -> list[int]:
    request = request_of("r", PROMPT, max_tokens=NUM_TOKENS)
    async for event in node.submit(request):
        seen.append(event)
    assert isinstance(seen[-1], Finished)
    return tokens_of(seen)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def cuts(proxy: RedisProxy) -> dict[str, Callable[[], None]]:
    return {"silent": proxy.silence, "refused": proxy.refuse}


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_a_node_that_was_cut_off_reads_on_where_it_was(
    proxy: RedisProxy, replica: FakeReplica, client: redis.Redis, how: str
) -> None:
    """Its heartbeat has ended long since; the replica keeps what it has for it."""

    async def main() -> None:
        async with fake_node(proxy.url, [replica]) as node:
            seen: list[Event] = []
            replica.steps_at_once = 1
            task = asyncio.create_task(answer(node, seen))
            await until(lambda: bool(tokens_of(seen)))
            await asyncio.to_thread(cuts(proxy)[how])
            await until(lambda: not client.exists(f"vlm:node:{node.node}"))
            await asyncio.sleep(4 * TTL_S)  # many looks of the replica at its nodes
            replica.steps_at_once = 0
            await asyncio.sleep(TTL_S)
            await asyncio.to_thread(proxy.mend)
            assert await asyncio.wait_for(task, 60) == ANSWER
            assert len(replica.taken) == 1

    asyncio.run(main())


def test_a_node_that_was_given_up_begins_its_answers_anew_without_a_seam(
    proxy: RedisProxy, replica: FakeReplica, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "NODE_PATIENCE_S", 0.3)

    async def main() -> None:
        async with fake_node(proxy.url, [replica]) as node:
            seen: list[Event] = []
            replica.steps_at_once = 1
            task = asyncio.create_task(answer(node, seen))
            await until(lambda: bool(tokens_of(seen)))
            await asyncio.to_thread(proxy.silence)
            await until(lambda: not replica.replica._calls)
            replica.steps_at_once = 0
            await asyncio.to_thread(proxy.mend)
            assert await asyncio.wait_for(task, 60) == ANSWER
            assert len(replica.taken) == 2

    asyncio.run(main())


def test_answers_whose_last_words_were_lost_meanwhile_are_asked_for_again(
    proxy: RedisProxy, replica: FakeReplica, client: redis.Redis
) -> None:
    """The stream of a node that does not read ends after a while; no later batch shows the gap."""

    async def main() -> None:
        async with fake_node(proxy.url, [replica]) as node:
            seen: list[Event] = []
            replica.hold_after = 5
            task = asyncio.create_task(answer(node, seen))
            await until(lambda: bool(tokens_of(seen)))
            await asyncio.to_thread(proxy.refuse)  # a reply on its way is lost too
            replica.hold_after = None
            stream = stream_name(node.node)
            await until(lambda: "Finished" in str(client.xrange(stream)))
            for _ in range(40):  # a write whose reply was late is written again
                client.delete(stream)
                await asyncio.sleep(4 * TTL_S / 40)
            await asyncio.to_thread(proxy.mend)
            assert await asyncio.wait_for(task, 60) == ANSWER
            assert len(replica.taken) == 2

    asyncio.run(main())


def test_a_node_that_leaves_leaves_nothing_running(redis_server: RedisServer, replica: FakeReplica) -> None:
    """Only a node that fell silent is waited for."""

    async def main() -> None:
        async with fake_node(redis_server.url, [replica]) as node:
            replica.steps_at_once = 5
            task = asyncio.create_task(answer(node, []))
            await until(lambda: bool(replica.replica._calls))
            node._heartbeat.close()
            await until(lambda: not replica.replica._calls)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_a_process_that_stood_still_takes_nobody_for_dead(client: redis.Redis) -> None:
    now = [0.0]
    members = registry.Registry(client, "replica")
    watch = registry.Watch(members, lambda: now[0])
    members.beat("a", {})
    assert watch.refresh() and watch.outages == 0
    members.leave("a")
    now[0] += 3600.0  # it was stopped
    assert watch.refresh() and watch.outages == 1 and not watch.is_dead("a")
    now[0] += registry.GRACE_S
    assert watch.refresh() and watch.is_dead("a")


def test_a_member_that_fell_silent_is_gone_after_the_patience_and_one_that_left_at_once(
    client: redis.Redis,
) -> None:
    now = [0.0]
    members = registry.Registry(client, "node")
    watch = registry.Watch(members, lambda: now[0])
    for name in ("silent", "left"):
        members.beat(name, {})
    assert watch.refresh() and not watch.is_gone("silent", 30.0)
    client.delete("vlm:node:silent")
    members.leave("left")
    for _ in range(29):
        watch.refresh()
        assert watch.is_gone("left", 30.0) and not watch.is_gone("silent", 30.0)
        now[0] += 1.0
    now[0] += 1.0
    assert watch.is_gone("silent", 30.0)
    members.beat("silent", {})
    watch.refresh()
    client.delete("vlm:node:silent")
    watch.refresh()
    assert not watch.is_gone("silent", 30.0)  # its time begins anew


NUM_STREAMS, MAX_TOKENS = 8, 600  # of four nodes: as many as two replicas run at once


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [12, 30])
def test_a_node_that_is_away_loses_no_stream_that_its_replicas_finished(
    redis_server: RedisServer, seconds: int
) -> None:
    """Its packets vanish, its connections are refused, or it is stopped: one node of each kind at once."""
    small = ("--kv-cache-mb", "16")
    url, port = redis_server.url, redis_server.port
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(cluster_worker("generate", url, *small))
        silent, refused = (stack.enter_context(redis_proxy(port)) for _ in range(2))
        addresses = (silent.url, refused.url, url, url)
        nodes = [stack.enter_context(node_process(address)) for address in addresses]
        begin(nodes)
        assert all(node.poll() is None for node in nodes)
        silent.silence()
        refused.refuse()
        nodes[2].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        nodes[2].send_signal(signal.SIGCONT)
        refused.mend()
        silent.mend()
        *ends, undisturbed = [ends_of(node) for node in nodes]
        assert [end for end, _ in undisturbed] == ["length"] * NUM_STREAMS
        assert ends == [undisturbed] * 3


@contextlib.contextmanager
def node_process(url: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "tests/node_child.py", url, "2", str(NUM_STREAMS), str(MAX_TOKENS)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            yield node
        finally:
            node.kill()


def begin(nodes: list[subprocess.Popen[str]]) -> None:
    """Returns once every stream of every node has begun."""
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write("\n")
        node.stdin.flush()
    for node in nodes:
        assert node.stdout is not None and node.stdout.readline() == "begun\n"


def ends_of(node: subprocess.Popen[str]) -> list[tuple[str, str]]:
    assert node.stdout is not None
    return [(end, text) for end, text in json.loads(node.stdout.read())]
