"""What a streamed answer's reader gets, whatever the pace of either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from vlm.api.chat import streaming
from vlm.api.chat.streaming import MOST_WAITING, EventStream
from vlm.requests.errors import ApiError


class Reader:
    """The other end: takes each write when `ready` is set."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.ready, self.left = asyncio.Event(), asyncio.Event()
        self.ready.set()

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await self.ready.wait()
            self.writes.append(message["body"])

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_events_that_come_together_are_one_write_in_order() -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"a"
        yield b"b"
        await settle()
        yield b"c"
        yield b"d"

    async def run() -> list[bytes]:
        reader = Reader()
        await EventStream(events(), lambda: None)({}, reader.receive, reader.send)
        return reader.writes

    assert asyncio.run(run()) == [b"ab", b"cd", b""]


def test_a_reader_that_does_not_read_holds_the_answer() -> None:
    async def run() -> None:
        drawn = 0
        reader = Reader()

        async def events() -> AsyncGenerator[bytes]:
            nonlocal drawn
            while drawn < 1000:
                drawn += 1
                yield b"."

        task = asyncio.create_task(EventStream(events(), lambda: None)({}, reader.receive, reader.send))
        reader.ready.clear()
        await settle()
        assert 0 < drawn <= MOST_WAITING * 2
        reader.ready.set()
        await task
        assert b"".join(reader.writes) == b"." * 1000

    asyncio.run(run())


def test_what_came_before_an_error_is_written_before_it() -> None:
    async def run() -> bytes:
        reader = Reader()

        async def events() -> AsyncGenerator[bytes]:
            yield b"data: first\n\n"
            raise ApiError(503, "overloaded", "The engine is busy.")

        await EventStream(events(), lambda: None)({}, reader.receive, reader.send)
        return b"".join(reader.writes)

    first, error, _ = asyncio.run(run()).split(b"\n\n", 2)
    assert first == b"data: first" and b"overloaded" in error


def test_a_silent_answer_keeps_the_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)

    async def run() -> list[bytes]:
        reader = Reader()

        async def events() -> AsyncGenerator[bytes]:
            while len(reader.writes) < 2:
                await asyncio.sleep(0)
            yield b"late"

        await EventStream(events(), lambda: None)({}, reader.receive, reader.send)
        return reader.writes

    written = asyncio.run(run())
    assert written[:2] == [streaming.KEEP_ALIVE] * 2 and written[-2:] == [b"late", b""]


def test_a_reader_that_leaves_ends_the_answer() -> None:
    async def run() -> None:
        reader, ended, closed = Reader(), asyncio.Event(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(EventStream(events(), closed.set)({}, reader.receive, reader.send))
        await settle()
        reader.left.set()
        await task
        assert ended.is_set() and closed.is_set() and reader.writes == [b"first"]

    asyncio.run(run())
