"""Slow is not hung, and hung is found: what watches a count of progress, in this process and in a child."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import prompt_of, request_of
from hypothesis import given
from hypothesis import strategies as st
from waiting import until, wait_for

from llm.request import Event, Failed, Finished, WantVisual
from preprocess.types import TileGrid, Tiles
from workers.contract.engine_client import EngineUnavailable
from workers.contract.tiles_handle import MadeTiles
from workers.local.engine_process import EngineProcess
from workers.local.progress import LOOK_S, Progress, StallWatch
from workers.local.step_thread import StepThread

STALL_S = 60.0
LONGEST_S = 2 * LOOK_S  # that one look counts for


class Looks:
    """A clock that stands still until it is told, and counts who reads it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return self.now

    def passes(self, seconds: float, wait: Callable[[Callable[[], bool]], None] = wait_for) -> None:
        """Time passes, and whoever watches has looked at each moment of it."""
        for _ in range(round(seconds / LONGEST_S)):
            self.now += LONGEST_S
            seen = self.count
            wait(lambda seen=seen: self.count >= seen + 2)  # type: ignore[misc]


EIGHTHS = st.integers(0, 24).map(lambda count: count / 8)  # seconds that add up exactly


@given(st.lists(st.tuples(EIGHTHS, st.integers(0, 1)), max_size=200), st.integers(1, 30))
def test_only_a_count_that_stood_still_for_the_stated_time_hangs(
    looks: list[tuple[float, int]], stall_s: int
) -> None:
    clock = Looks()
    watch = StallWatch(stall_s, clock)
    watch.look(0)
    count, silent_s = 0, 0.0
    for seconds, progress in looks:
        clock.now += seconds
        count += progress
        silent_s = 0.0 if progress else silent_s + min(seconds, LONGEST_S)
        assert watch.look(count) == (silent_s >= stall_s)


def test_a_watcher_that_stood_still_itself_blames_nobody() -> None:
    """The machine was suspended, or the whole process group stopped."""
    clock = Looks()
    watch = StallWatch(STALL_S, clock)
    watch.look(1)
    for _ in range(5):
        clock.now += 3600.0
        assert not watch.look(1)


def test_idle_is_no_hang() -> None:
    clock = Looks()
    watch = StallWatch(STALL_S, clock)
    for _ in range(1000):
        clock.now += LOOK_S
        assert not watch.look(None)
    watch.look(7)
    clock.now += LOOK_S
    assert not watch.look(7)


class Slow:
    """One step, as many pieces as are let go."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.pieces = threading.Semaphore(0)
        self.steps = 0
        self.left = 0

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        while self.left:
            self.pieces.acquire()
            self.left -= 1
            self.progress.tick()
        self.steps += 1


class Rig:
    def __init__(self) -> None:
        self.clock = Looks()
        self.crashes: list[str] = []
        self.thread: StepThread[Slow, None] = StepThread(
            Slow,
            lambda *_: None,
            lambda: self.crashes.append("crashed"),
            stall_s=STALL_S,
            look_s=0.001,
            clock=self.clock,
        )
        self.slow = self.thread.start()

    def begin(self, pieces: int) -> None:
        self.thread.tell(lambda slow: setattr(slow, "left", pieces))

    def let_go(self) -> None:
        before = self.slow.progress.count
        self.slow.pieces.release()
        wait_for(lambda: self.slow.progress.count > before)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for _ in range(100):
        made.slow.pieces.release()
    made.thread.close()


def test_a_step_of_any_length_goes_on_as_long_as_its_pieces_do(rig: Rig) -> None:
    rig.begin(pieces=3)
    for _ in range(3):
        rig.clock.passes(STALL_S - 3 * LONGEST_S)
        rig.let_go()
    wait_for(lambda: rig.slow.steps == 1)
    rig.clock.passes(STALL_S + 3 * LONGEST_S)  # idle
    assert not rig.crashes


def test_a_step_that_hangs_is_told_once_within_the_stated_time(rig: Rig) -> None:
    rig.begin(pieces=5)
    rig.clock.passes(STALL_S / 2)
    rig.let_go()

    def watch_until_found(condition: Callable[[], bool]) -> None:
        wait_for(lambda: condition() or bool(rig.crashes))

    rig.clock.passes(STALL_S + 3 * LONGEST_S, watch_until_found)
    wait_for(lambda: bool(rig.crashes))
    rig.thread.close()  # does not wait for it
    rig.slow.pieces.release(100)
    wait_for(lambda: rig.slow.left == 0)
    assert rig.crashes == ["crashed"]


class Child:
    """An engine process whose encoder does a layer of a tile for every byte that it is sent."""

    LAYERS = 3  # of a tile

    def __init__(self, folder: Path) -> None:
        self.clock = Looks()
        path = str(folder / "layers")
        self._listener = socket.create_server(path, family=socket.AF_UNIX)
        command = [sys.executable, str(Path(__file__).parent / "slow_engine_child.py"), path]
        self.engine = EngineProcess(command, stall_s=STALL_S, look_s=0.001, clock=self.clock)

    async def start(self) -> None:
        starting = asyncio.create_task(self.engine.start())
        self._layers, _ = await asyncio.to_thread(self._listener.accept)
        await starting

    async def close(self) -> None:
        await self.engine.close()
        self._layers.close()
        self._listener.close()

    async def passes(self, seconds: float, until_: Callable[[], bool] = lambda: False) -> None:
        for _ in range(round(seconds / LONGEST_S)):
            self.clock.now += LONGEST_S
            seen = self.clock.count
            await until(lambda seen=seen: self.clock.count >= seen + 2 or until_())  # type: ignore[misc]

    async def layer(self) -> None:
        """Returns once it is done."""
        await asyncio.to_thread(self._layers.sendall, b".")
        assert await asyncio.to_thread(self._layers.recv, 1) == b"."

    async def answer(self, name: str, *parts: Any) -> list[Event]:
        """To a prompt of these parts, an image being (name, tiles)."""
        prompt = prompt_of(*parts)
        events = []
        async for event in self.engine.submit(request_of(name, prompt, max_tokens=1)):
            events.append(event)
            if isinstance(event, WantVisual):
                (span,) = prompt.spans
                grid = TileGrid(1, span.length, False, 2, 2)
                pixels = np.zeros((span.length, 2, 2, 3), np.uint8)
                await self.engine.put_tiles(event.key, MadeTiles(Tiles(pixels, grid)))
        return events


@pytest.mark.timeout(120)
def test_a_slow_encode_kills_nothing_keeps_it_ready_and_lets_others_be_answered_between_its_pieces(
    tmp_path: Path,
) -> None:
    """Nearly a minute a layer; the engine is killed only when no layer is done any more, and comes back."""

    async def main() -> None:
        child = Child(tmp_path)
        await child.start()
        engine, slow = child.engine, STALL_S - 3 * LONGEST_S
        try:
            image = asyncio.create_task(child.answer("image", [1], ("image", 3), [2]))
            await child.layer()
            text = asyncio.create_task(child.answer("text", [3, 4]))
            for _ in range(Child.LAYERS - 1):
                await child.passes(slow)
                assert engine.ready and engine.restarts == 0 and not text.done()
                await child.layer()
            events = await asyncio.wait_for(text, 60)  # after a tile, and before the next one is done
            assert isinstance(events[-1], Finished) and not image.done()
            for _ in range(Child.LAYERS):
                await child.passes(slow)
                assert engine.ready
                await child.layer()
            assert engine.restarts == 0 and not image.done()
            await child.passes(STALL_S + 3 * LONGEST_S, image.done)
            events = await asyncio.wait_for(image, 60)
            assert isinstance(events[-1], Failed) and events[-1].code == "engine_died"
            assert not engine.ready
            await until(lambda: engine.restarts == 1)
        finally:
            await child.close()

    asyncio.run(main())


@pytest.mark.timeout(120)
def test_an_engine_that_hangs_while_it_loads_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        clock = Looks()
        engine = EngineProcess(command, start_stall_s=STALL_S, look_s=0.001, clock=clock)
        starting = asyncio.create_task(engine.start())
        await until(lambda: clock.count > 0)
        for _ in range(round(STALL_S / LONGEST_S) + 5):
            clock.now += LONGEST_S
            seen = clock.count
            await until(lambda seen=seen: clock.count >= seen + 2 or starting.done())  # type: ignore[misc]
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(starting, 60)

    asyncio.run(main())
