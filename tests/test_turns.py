"""Whose image is decoded next: users.md S3 and S7."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from llm.request import Priority
from workers.contract.stages import Urgency
from workers.contract.turns import AGEING_S, Turns


def test_s3_decoded_bytes_in_flight_stay_within_the_budget() -> None:
    async def main() -> None:
        turns = Turns(9, 100)
        held = peak = 0

        async def use(num_bytes: int) -> None:
            nonlocal held, peak
            async with turns.hold(num_bytes, Urgency()):
                held += num_bytes
                peak = max(peak, held)
                await asyncio.sleep(0)
                held -= num_bytes

        tasks = [asyncio.create_task(use(size)) for size in (60, 60, 30, 100, 10, 90, 1) * 3]
        await asyncio.sleep(0)
        for task in tasks[3::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert 0 < peak <= 100
        # whatever was cancelled, all of it is free again, and more than all of it is served alone
        async with turns.hold(1_000, Urgency()):
            pass

    asyncio.run(main())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Room:
    """Named work that holds its turn until it is told to end."""

    def __init__(self, places: int, clock: Clock | None = None) -> None:
        self.turns = Turns(places, 100, clock or Clock())
        self.running: list[str] = []
        self.urgencies: dict[str, Urgency] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, name: str, priority: Priority, num_bytes: int = 1) -> None:
        self.urgencies[name] = Urgency(priority)
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._work(name, num_bytes))
        await asyncio.sleep(0)

    async def _work(self, name: str, num_bytes: int) -> None:
        async with self.turns.hold(num_bytes, self.urgencies[name]):
            self.running.append(name)
            await self._ends[name].wait()
        self.running.remove(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await asyncio.gather(*(self._tasks[name] for name in names))
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await asyncio.sleep(0)


def test_interactive_images_pass_the_batch_images_that_wait() -> None:
    async def main() -> None:
        room = Room(1)
        for name in ("b1", "b2", "b3"):
            await room.enter(name, "batch")
        await room.enter("i1", "interactive")
        await room.enter("i2", "interactive")
        order = []
        while room.running:
            order += room.running
            await room.end(*room.running)
        assert order == ["b1", "i1", "i2", "b2", "b3"]

    asyncio.run(main())


@pytest.mark.parametrize(("places", "taken"), [(1, 1), (2, 1), (4, 3)])
def test_batch_work_leaves_a_place_where_there_are_several(places: int, taken: int) -> None:
    async def main() -> None:
        room = Room(places)
        for number in range(6):
            await room.enter(f"b{number}", "batch")
        assert room.running == [f"b{number}" for number in range(taken)]
        await room.enter("i", "interactive")
        assert ("i" in room.running) == (places > 1)
        await room.end("b0")
        assert "i" in room.running

    asyncio.run(main())


def test_aged_batch_work_is_not_passed_for_ever() -> None:
    async def main() -> None:
        clock = Clock()
        room = Room(1, clock)
        await room.enter("i0", "interactive")
        await room.enter("b", "batch")
        clock.now = AGEING_S - 1
        await room.enter("early", "interactive")
        clock.now = AGEING_S + 1
        await room.enter("late", "interactive")
        await room.end("i0")
        assert room.running == ["early"]
        await room.end("early")
        assert room.running == ["b"]
        await room.end("b")
        assert room.running == ["late"]
        await room.end("late")

    asyncio.run(main())


def test_a_batch_image_that_an_interactive_request_joins_goes_first() -> None:
    async def main() -> None:
        room = Room(1)
        for name in ("b1", "b2", "b3"):
            await room.enter(name, "batch")
        room.urgencies["b3"].priority = "interactive"
        await room.end("b1")
        assert room.running == ["b3"]
        await room.end("b3")
        await room.end("b2")

    asyncio.run(main())


def test_a_batch_image_that_an_interactive_request_joins_takes_the_place_that_is_free() -> None:
    async def main() -> None:
        room = Room(2)
        await room.enter("b1", "batch")
        await room.enter("b2", "batch")
        await room.enter("b3", "batch")
        assert room.running == ["b1"]
        room.urgencies["b3"].priority = "interactive"
        await asyncio.sleep(0)
        assert room.running == ["b1", "b3"]
        await room.end("b1", "b3")
        await room.end("b2")
        room.urgencies["b2"].priority = "interactive"  # too late, and nobody's business any more
        await room.enter("i1", "interactive")
        await room.enter("i2", "interactive")
        assert room.running == ["i1", "i2"]
        await room.end("i1", "i2")

    asyncio.run(main())


@pytest.mark.parametrize("leavers", [("b2",), ("b1",), ("b2", "i1"), ("i1", "b1", "b2")])
def test_whoever_leaves_gives_everything_back(leavers: Sequence[str]) -> None:
    async def main() -> None:
        room = Room(2)
        await room.enter("b1", "batch", 60)
        await room.enter("b2", "batch", 60)
        await room.enter("i1", "interactive", 60)
        for name in leavers:
            await room.leave(name)
            if name in room.running:
                room.running.remove(name)
        await room.end(*({"b1", "b2", "i1"} - set(leavers)))
        await room.enter("all", "batch", 100)
        await room.enter("more", "interactive", 1)
        assert room.running == ["all"]
        await room.end("all", "more")

    asyncio.run(main())
