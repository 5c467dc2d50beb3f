"""Events over Redis streams: order, resume after a lost connection, slow and dead readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from conftest import RedisServer
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_for

from llm.request import Delta, Event, Finished, Prompt, Request, TokenLogprob, Usage
from workers.cluster.event_stream import EventPublisher, EventReader, append_event, stream_name
from workers.cluster.node.remote_calls import Delivery, Lost, RemoteCall
from workers.cluster.redis_client import connect
from workers.contract.messages import event_from_json
from workers.contract.streams import end_tasks

pytestmark = pytest.mark.redis

LAST = Finished("c", 0, "stop", Usage(1, 0, 0, 1))


def delta(number: int, choice: int = 0, call: str = "c") -> Delta:
    return Delta(call, choice, (number,), f"<{number}>", (TokenLogprob(number, -1.0),))


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "Delta")


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.sets(st.integers(0, 2)))
def test_melted_deltas_say_the_same(pieces: list[tuple[int, int]], ended: set[int]) -> None:
    events: list[Any] = []
    for choice, number in pieces:
        append_event(events, delta(number, choice))
    for choice in sorted(ended):
        append_event(events, Finished("c", choice, "stop"))
    for choice in range(3):
        numbers = [number for other, number in pieces if other == choice]
        deltas = [event for event in events if isinstance(event, Delta) and event.choice == choice]
        assert len(deltas) <= 1  # bounded by choices, not by tokens
        assert [token for event in deltas for token in event.token_ids] == numbers
        assert "".join(event.text for event in deltas) == "".join(f"<{number}>" for number in numbers)
        assert [p.token_id for event in deltas for p in event.logprobs] == numbers


def test_events_arrive_in_order_and_what_was_read_is_trimmed(redis_url: str, client: redis.Redis) -> None:
    ended: list[str] = []
    publisher = EventPublisher(client, ended.append)
    publisher.start()
    publisher.open("c", "node")
    seen: list[tuple[int, list[dict[str, Any]]]] = []

    async def main() -> None:
        reader = EventReader(redis_url, "node", lambda call, number, events: seen.append((number, events)))
        task = asyncio.create_task(reader.run())
        for number in range(50):
            publisher.feed([delta(number)])
            await asyncio.sleep(0.001)
        publisher.feed([LAST, delta(99)])
        deadline = time.monotonic() + 30
        while not (ended and client.xlen(stream_name("node")) == 0):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await end_tasks(task)

    asyncio.run(main())
    publisher.close()
    events = [event for _, batch in seen for event in batch]
    assert [number for number, _ in seen] == list(range(len(seen)))
    assert text_of(events) == "".join(f"<{number}>" for number in range(50))
    assert events[-1]["type"] == "Finished" and ended == ["c"]


def test_a_reader_that_does_not_read_costs_bounded_memory_and_holds_up_nobody(
    redis_url: str, client: redis.Redis
) -> None:
    ended: list[str] = []
    publisher = EventPublisher(client, ended.append, max_lag=8)
    publisher.start()
    publisher.open("slow", "deaf")
    for number in range(500):
        publisher.feed([delta(number, call="slow")])
        if number < 20:
            time.sleep(0.005)
    wait_for(lambda: client.xlen(stream_name("deaf")) >= 8)
    publisher.open("c", "awake")
    publisher.feed([delta(1), LAST])
    wait_for(lambda: ended == ["c"])
    assert client.xlen(stream_name("deaf")) <= 9
    assert publisher.num_pending <= 1

    seen: list[dict[str, Any]] = []

    async def main() -> None:
        reader = EventReader(redis_url, "deaf", lambda call, number, events: seen.extend(events))
        task = asyncio.create_task(reader.run())
        deadline = time.monotonic() + 30
        while "<499>" not in text_of(seen):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await end_tasks(task)

    asyncio.run(main())
    publisher.close()
    assert text_of(seen) == "".join(f"<{number}>" for number in range(500))


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["stopped", "frozen"])
def test_a_stream_goes_on_where_it_was_after_redis_was_away(redis_server: RedisServer, outage: str) -> None:
    begin, end = {
        "stopped": (redis_server.stop, redis_server.start),
        "frozen": (redis_server.freeze, redis_server.thaw),
    }[outage]
    client = connect(redis_server.url)
    publisher = EventPublisher(client, lambda call: None)
    publisher.start()
    publisher.open("c", "node")
    call = a_call()
    received: list[Event] = []

    async def main() -> None:
        reader = EventReader(redis_server.url, "node", lambda _, number, events: take(call, number, events))
        task = asyncio.create_task(reader.run())
        for number in range(300):
            publisher.feed([delta(number)])
            if number == 100:
                await asyncio.to_thread(begin)
            if number == 200:
                await asyncio.sleep(3)
                await asyncio.to_thread(end)
            await asyncio.sleep(0.002)
        publisher.feed([LAST])
        async with asyncio.timeout(30):
            while not (received and isinstance(received[-1], Finished)):
                event = await call.events.get()
                assert not isinstance(event, Lost)
                received.append(event)  # type: ignore[arg-type]
        await end_tasks(task)

    asyncio.run(main())
    publisher.close()
    client.close()
    assert "".join(e.text for e in received if isinstance(e, Delta)) == "".join(f"<{n}>" for n in range(300))


def a_call() -> RemoteCall:
    call = RemoteCall(Request("c", Prompt((1,))), "key", 0.0, float("inf"))
    call.begin_attempt()
    return call


def take(call: RemoteCall, number: int, events: list[dict[str, Any]]) -> None:
    call.take(number, [event_from_json(event) for event in events])


def drain(call: RemoteCall) -> list[Any]:
    events = []
    while not call.events.empty():
        events.append(call.events.get_nowait())
    return events


def test_a_batch_written_twice_is_taken_once() -> None:
    call = a_call()
    for number in (0, 0, 1, 1, 0):
        call.take(number, [delta(number)])
    assert [event.token_ids for event in drain(call)] == [(0,), (1,)]


def test_a_missing_batch_ends_the_attempt() -> None:
    call = a_call()
    call.take(0, [delta(0)])
    call.take(2, [delta(2)])
    call.take(3, [delta(3)])
    assert drain(call)[1:] == [Lost(1)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_replay_cut_differently_continues_exactly_where_the_answer_stopped(data: st.DataObject) -> None:
    """Tokens and text of a replay come in other pieces; text may lag behind its tokens."""
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
    whole = "".join(f"<{token}>" for token in tokens)

    def pieces() -> list[Delta]:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {len(tokens)})
        found, start, told = [], 0, 0
        for cut in cuts:
            text_until = len(whole) if cut == len(tokens) else data.draw(st.integers(told, len(whole)))
            found.append(Delta("c", 0, tuple(tokens[start:cut]), whole[told:text_until]))
            start, told = cut, text_until
        return found

    delivery = Delivery()
    got: list[Delta] = []
    first = pieces()
    for event in first[: data.draw(st.integers(0, len(first)))]:
        got += [new] if (new := delivery.pass_on(event)) else []  # type: ignore[list-item]
    delivery.restart()
    for event in pieces():
        got += [new] if (new := delivery.pass_on(event)) else []  # type: ignore[list-item]
    assert [token for event in got for token in event.token_ids] == tokens
    assert "".join(event.text for event in got) == whole


def test_a_replay_that_differs_is_an_error_and_not_a_mix() -> None:
    delivery = Delivery()
    delivery.pass_on(delta(1))
    delivery.restart()
    with pytest.raises(ValueError, match="differently"):
        delivery.pass_on(delta(2))


def test_choices_that_finished_are_not_finished_twice() -> None:
    delivery = Delivery()
    assert delivery.pass_on(Finished("c", 1, "stop")) is not None
    delivery.restart()
    assert delivery.pass_on(Finished("c", 1, "stop")) is None
    assert delivery.pass_on(LAST) == LAST
