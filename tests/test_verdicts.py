"""A failure ends with those who waited for it: whoever asks later gets an attempt of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import numpy as np
from fake_backend import image_key, prompt_of, request_of
from fake_engine_client import model_spec, png
from fake_runner import fake_runner
from waiting import until

from llm.request import Event, Failed, Finished, Request, SamplingParams, VisualKey, WantVisual
from preprocess.types import TileGrid, Tiles
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from workers.contract.stages import deadline_passed
from workers.contract.tiles_handle import TilesHandle
from workers.local.engine_runner import EngineRunner
from workers.local.preprocess_inline import InlinePreprocess

TRANSIENT = ("preprocessing_timeout", "The image was not processed in time. Please try again.")


def run(runner: EngineRunner) -> list[Event]:
    events: list[Event] = []
    while runner.has_work:
        events += runner.step()
        runner.check_integrity()
    return events


def test_after_a_failure_the_same_image_is_asked_for_again() -> None:
    runner, key = fake_runner(), image_key("A")
    for number in range(3):
        runner.submit(request_of(f"r{number}", prompt_of([1], ("A", 5), [2])))
        assert run(runner) == [WantVisual(f"r{number}", key)]
        runner.fail_tiles(key, *TRANSIENT)
        assert run(runner) == [Failed(f"r{number}", *TRANSIENT)]
    runner.submit(request_of("last", prompt_of([1], ("A", 5), [2])))
    assert run(runner) == [WantVisual("last", key)]
    runner.put_tiles(key, Tiles(np.zeros((1, 2, 2, 3), np.uint8), TileGrid(0, 0, True, 2, 2)))
    assert isinstance(run(runner)[-1], Finished)


def test_all_who_waited_are_told() -> None:
    runner, key = fake_runner(), image_key("A")
    for number in range(3):
        runner.submit(request_of(f"r{number}", prompt_of([1, number], ("A", 5), [2])))
    run(runner)
    runner.fail_tiles(key, *TRANSIENT)
    assert {event.request_id for event in run(runner)} == {"r0", "r1", "r2"}


class SlowToTell:
    """An engine whose `fail_tiles` takes a while, as one behind a network does; it lacks every image."""

    ready = True

    def __init__(self) -> None:
        self.telling = asyncio.Event()
        self.tell = asyncio.Event()
        self.outcomes: dict[str, asyncio.Future[Event]] = {}

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        outcome = self.outcomes[request.id] = asyncio.get_running_loop().create_future()
        yield WantVisual(request.id, request.prompt.spans[0].key)
        yield await outcome

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        self.outcomes["late"].set_result(Failed("late", "had_tiles", ""))

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        waiting = [name for name, outcome in self.outcomes.items() if not outcome.done()]
        self.telling.set()
        await self.tell.wait()
        for name in waiting:
            self.outcomes[name].set_result(Failed(name, code, message))


def test_who_asks_while_a_failure_is_being_told_gets_an_attempt_of_their_own() -> None:
    class FailsOnce(InlinePreprocess):
        calls = 0

        async def tiles(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            FailsOnce.calls += 1
            if FailsOnce.calls == 1:
                raise deadline_passed()
            return await super().tiles(*arguments, **keywords)

    async def main() -> None:
        engine = SlowToTell()
        pipeline = Pipeline(model_spec(), FailsOnce(), engine)  # type: ignore[arg-type]
        message = [ChatMessage("user", (ImageInput(png()), "What is this?"))]

        async def ask(name: str) -> Event:
            async with contextlib.aclosing(
                pipeline.run(pipeline.prepare(name, message, SamplingParams()))
            ) as events:
                return [event async for event in events][-1]

        first = asyncio.create_task(ask("first"))
        await engine.telling.wait()
        late = asyncio.create_task(ask("late"))
        await until(lambda: "late" in engine.outcomes)
        engine.tell.set()
        assert (await first).code == TRANSIENT[0]  # type: ignore[union-attr]
        async with asyncio.timeout(20):
            assert (await late).code == "had_tiles"  # type: ignore[union-attr]

    asyncio.run(main())
