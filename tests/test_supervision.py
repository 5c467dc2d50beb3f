"""No background loop ends in silence, whatever it meets; what a process does not know it drops and says."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fake_backend import greedy, prompt_of, request_of
from fake_cluster import FakeNode, FakeReplica, fake_node
from fake_runner import fake_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until, wait_for

from llm.request import Delta, Event, Failed, Finished
from vlm.requests.durable import DurableLog
from workers.cluster.event_stream import stream_name
from workers.cluster.members import HeartbeatThread, Registry
from workers.cluster.names import REPLICA
from workers.cluster.redis_client import connect
from workers.contract import loops, versions
from workers.contract.engine_client import EngineUnavailable
from workers.contract.loops import LoopThread, keep_going
from workers.contract.streams import end_tasks
from workers.local.engine_process import EngineProcess
from workers.local.engine_thread import LocalEngine

ROOT = Path(__file__).resolve().parent.parent
PROMPT = prompt_of([1, 2, 3])
ANSWER = greedy(PROMPT, 8)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "PAUSE_S", 0.001)
    monkeypatch.setattr(loops, "MAX_PAUSE_S", 0.01)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


OUTCOMES = st.lists(
    st.sampled_from([None, OSError("away"), ValueError("a fault"), KeyError("x")]), max_size=8
)


@settings(deadline=None, max_examples=25)
@given(OUTCOMES)
def test_a_loop_goes_on_after_any_error_and_ends_with_its_last_turn(outcomes: list[Exception | None]) -> None:
    left = [*outcomes, True]

    def turn() -> bool:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    async def awaited() -> bool:
        return turn()

    asyncio.run(asyncio.wait_for(keep_going("test", awaited, (OSError,)), 30))
    assert not left
    left = [*outcomes, True]
    thread = LoopThread("test", turn, (OSError,))
    thread.start()
    wait_for(lambda: not left)
    thread.close()


def test_an_error_that_was_expected_is_one_line_and_any_other_comes_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = [OSError("away")] * 3 + [ValueError("a fault")] * 2

    async def turn() -> bool:
        if turns:
            raise turns.pop(0)
        return True

    asyncio.run(keep_going("the loop", turn, (OSError,)))
    told = [(record.levelno, bool(record.exc_info)) for record in caplog.records]
    assert told == [(logging.WARNING, False), (logging.ERROR, True), (logging.ERROR, True)]
    assert all("the loop" in record.getMessage() for record in caplog.records)


def test_only_its_own_cancellation_ends_a_loop() -> None:
    """What it waits for may be cancelled too, such as work in a pool that closes."""

    async def main() -> None:
        turns: list[asyncio.Future[None]] = []

        async def turn() -> None:
            turns.append(asyncio.get_running_loop().create_future())
            await turns[-1]

        task = asyncio.create_task(keep_going("test", turn))
        for count in (1, 2, 3):
            await until(lambda count=count: len(turns) == count)  # type: ignore[misc]
            turns[-1].cancel()
        await until(lambda: len(turns) == 4)
        await end_tasks(task)
        assert task.cancelled()

    asyncio.run(main())


def test_closing_a_loop_ends_its_pause() -> None:
    def turn() -> None:
        paused.release()
        thread.pause(3600)

    paused = threading.Semaphore(0)
    thread = LoopThread("test", turn)
    thread.start()
    paused.acquire()
    thread.wake()
    paused.acquire()
    thread.close()


@pytest.fixture(autouse=True)
def nothing_noted_yet() -> None:
    """What was dropped before, by other tests too, has its line in the log already."""
    versions._dropped.clear()


def strange_engine(mode: str, mark: Path) -> EngineProcess:
    return EngineProcess([sys.executable, str(ROOT / "tests/strange_engine_child.py"), mode, str(mark)])


async def ask(engine: Any, name: str) -> list[Event]:
    return [event async for event in engine.submit(request_of(name, PROMPT))]


def test_a_parent_reads_what_it_knows_of_a_newer_engine_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = strange_engine("newer", tmp_path / "mark")
        await engine.start()
        try:
            for number in range(3):
                events = await ask(engine, f"r{number}")
                assert tokens_of(events) == ANSWER and isinstance(events[-1], Finished)
            assert engine.restarts == 0
        finally:
            await engine.close()

    asyncio.run(main())
    dropped = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert len(dropped) == len(set(dropped))  # each once, however often it came
    for name in ("weather", "Thought", "Delta.mood", "Finished.mood", "Usage.carbon", "Timings.carbon"):
        assert any(name in line for line in dropped), name


def test_an_engine_process_that_leaves_the_rhythm_of_its_frames_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        engine = strange_engine("broken", tmp_path / "mark")
        await engine.start()
        try:
            last = (await ask(engine, "r"))[-1]
            assert isinstance(last, Failed) and last.code == "engine_died"
            await until(lambda: engine.ready and engine.restarts == 1)
            assert tokens_of(await ask(engine, "again")) == ANSWER
        finally:
            await engine.close()
        assert engine.pid is None

    asyncio.run(main())


def test_an_event_that_cannot_be_read_ends_its_own_stream_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        engine = strange_engine("unreadable", tmp_path / "mark")
        await engine.start()
        try:
            ends = await asyncio.gather(*(ask(engine, f"r{number}") for number in range(4)))
            failed = [events for events in ends if isinstance(events[-1], Failed)]
            assert failed == [ends[1], ends[3]]
            assert all(tokens_of(events) == ANSWER for events in ends if events not in failed)
            await until(lambda: not engine._streams._queues)
            assert (await engine.stats())["engine"]["running"] == 0 and engine.restarts == 0
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_system_without_room_for_a_process_keeps_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = strange_engine("known", tmp_path)
        await engine.start()
        try:
            with monkeypatch.context() as full:
                refused = asyncio.Event()

                def no_room(*arguments: Any, **options: Any) -> None:
                    refused.set()
                    raise BlockingIOError("no room")

                full.setattr("subprocess.Popen", no_room)
                assert engine._child is not None
                engine._child.signal(signal.SIGKILL)
                await refused.wait()
            await until(lambda: engine.ready)
            assert tokens_of(await ask(engine, "r")) == ANSWER
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_child_reads_what_it_knows_of_a_newer_parent(tmp_path: Path) -> None:
    async def main() -> None:
        engine = strange_engine("known", tmp_path)
        await engine.start()
        try:
            engine._send({"op": "dance", "version": 99})
            send = engine._send

            def newer(header: dict[str, Any], payload: bytes = b"") -> None:
                if request := header.get("request"):
                    request["mood"] = "good"
                    request["params"]["spice"] = 3
                    request["spans"] = [[*span, "more"] for span in request["spans"]]
                    if request["id"] == "bad":
                        del request["token_ids"]
                send({**header, "tide": "low"}, payload)

            engine._send = newer  # type: ignore[method-assign]
            (last,) = await ask(engine, "bad")
            assert isinstance(last, Failed) and last.code == "engine_died"
            assert tokens_of(await ask(engine, "r")) == ANSWER and engine.restarts == 0
        finally:
            await engine.close()

    asyncio.run(main())


def test_an_engine_in_process_that_fails_says_so_and_closes_in_peace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        runner = fake_runner()
        engine = LocalEngine(lambda: runner)
        await engine.start()
        runner.engine._backend.fail_next = True  # type: ignore[attr-defined]
        runner.engine._execute = None  # type: ignore[method-assign,assignment]
        last = (await ask(engine, "r"))[-1]
        assert isinstance(last, Failed) and last.code == "engine_died"
        await until(lambda: not engine.ready)
        with pytest.raises(EngineUnavailable):
            await ask(engine, "again")
        await engine.close()

    asyncio.run(main())
    assert any(record.exc_info for record in caplog.records)


def test_lines_whose_follow_up_fails_hold_up_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        with (tmp_path / "log").open("wb") as out:
            log, offsets = DurableLog(out.fileno(), 0), list[int]()

            def fail(offset: int) -> None:
                raise ValueError("a fault")

            results = await asyncio.gather(
                *(log.append(b"line\n", fail if number == 1 else offsets.append) for number in range(4)),
                return_exceptions=True,
            )
            await asyncio.wait_for(log.append(b"last\n", offsets.append), 30)
        assert [type(result) for result in results] == [type(None), ValueError, type(None), type(None)]
        assert offsets == [0, 10, 15, 20]

    asyncio.run(main())


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture
def replica(redis_url: str) -> Iterator[FakeReplica]:
    made = FakeReplica("a", redis_url)
    yield made
    made.replica.close()


NONSENSE = [
    b"not json",
    b"[]",
    b"7",
    b'"text"',
    b"{}",
    b'{"op": "dance", "key": "k"}',
    b'{"op": "visual"}',
    b'{"op": "tiles", "key": "k", "blob": "none"}',
    b'{"op": "alive", "key": "nobody", "calls": 7}',
    b'{"op": "fail", "key": "k", "mood": "good", "version": 99}',
]


@pytest.mark.redis
def test_a_replica_hears_the_rest_of_its_inbox_after_any_message(
    redis_url: str, client: redis.Redis, replica: FakeReplica
) -> None:
    def num_cached() -> int:
        return replica.replica._thread.ask(lambda runner: runner.engine.stats().kv_blocks_cached, 30)

    async def main() -> None:
        async with fake_node(redis_url, [replica]) as node:
            assert tokens_of(await ask(node, "r")) == ANSWER and num_cached() > 0
            client.rpush("vlm:inbox:a", *NONSENSE)
            await node.clear_cache()  # says so by the inbox
            await until(lambda: num_cached() == 0)
            assert tokens_of(await ask(node, "after")) == ANSWER

    asyncio.run(main())


@pytest.mark.redis
def test_a_node_reads_on_after_any_entry_of_its_stream(
    redis_url: str, client: redis.Redis, replica: FakeReplica
) -> None:
    strange: list[dict[str, Any]] = [
        {"b": "not json"},
        {"b": "7"},
        {"b": "[7]"},
        {"b": '[["unknown call", 0, []]]'},
        {"b": '[["short"]]', "v": 99},
        {"c": "another field"},
    ]

    async def main() -> None:
        async with fake_node(redis_url, [replica]) as node:
            for entry in strange:
                client.xadd(stream_name(node.node), entry)
            assert tokens_of(await ask(node, "r")) == ANSWER
            await until(lambda: client.xlen(stream_name(node.node)) == 0)

    asyncio.run(main())


@pytest.mark.redis
def test_events_that_a_node_cannot_read_cost_an_attempt_and_not_the_answer(
    redis_url: str, replica: FakeReplica
) -> None:
    async def main() -> None:
        async with fake_node(redis_url, [replica]) as node:
            take = node._reader._take

            def once(call: str, number: int, events: list[dict[str, Any]]) -> None:
                if deltas := [event for event in events if event["type"] == "Delta"]:
                    node._reader._take = take
                    del deltas[-1]["text"]
                take(call, number, events)

            node._reader._take = once
            assert tokens_of(await ask(node, "r")) == ANSWER
            assert len(replica.taken) == 2

    asyncio.run(main())


@pytest.mark.redis
def test_a_request_that_a_replica_cannot_read_ends_at_once(redis_url: str, replica: FakeReplica) -> None:
    async def main() -> None:
        async with fake_node(redis_url, [replica]) as node:
            replica.alter = lambda message: message["request"].pop("token_ids")
            last = (await ask(node, "r"))[-1]
            assert isinstance(last, Failed) and last.code == "engine_died"
            replica.alter = lambda message: None
            assert tokens_of(await ask(node, "after")) == ANSWER

    asyncio.run(main())


@pytest.mark.redis
def test_a_node_lives_with_members_whose_heartbeats_it_cannot_read(
    redis_url: str, client: redis.Redis, replica: FakeReplica
) -> None:
    async def main() -> None:
        registry = Registry(client, REPLICA)
        for name in ("odd1", "odd2", "odd3", "odd4"):
            registry.beat(name, {})
        client.set("vlm:replica:odd1", "not json")
        client.set("vlm:replica:odd2", "[]")
        client.set("vlm:replica:odd3", json.dumps({"stats": {"engine": {"note": "text"}}, "draining": True}))
        client.set("vlm:replica:odd4", json.dumps({"encoder_revision": "another"}))
        async with fake_node(redis_url, [replica]) as node:
            assert tokens_of(await ask(node, "r")) == ANSWER
            await until(lambda: "running" in node._loads.stats().get("engine", {}))
            assert "running" in (await node.stats())["engine"]

    asyncio.run(main())


@pytest.mark.redis
def test_a_heartbeat_goes_on_after_it_had_nothing_to_say(client: redis.Redis) -> None:
    said = threading.Semaphore(0)
    faults = [KeyError("a fault"), ValueError("another")]

    def about() -> dict[str, str]:
        said.release()
        if faults:
            raise faults.pop()
        return {"name": "a"}

    thread = HeartbeatThread(Registry(client, REPLICA), "a", about)
    thread.start()
    wait_for(lambda: "a" in Registry(client, REPLICA).alive())
    thread.close()
    assert not faults and "a" not in Registry(client, REPLICA).alive()


@pytest.mark.redis
def test_the_nodes_look_at_its_replicas_goes_on_after_any_error(
    redis_url: str, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with fake_node(redis_url, [replica]) as node:
            faults = [RuntimeError("a fault")] * 3

            def look(engine: FakeNode) -> None:
                if faults:
                    raise faults.pop()
                real(engine)

            real = FakeNode._look
            monkeypatch.setattr(FakeNode, "_look", look)
            await until(lambda: not faults)
            replica.replica.drain()
            await until(lambda: bool(node._replicas.alive["a"]["draining"]))

    asyncio.run(main())
