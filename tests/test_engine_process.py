"""The engine in its own process: streams end whatever happens to it, and it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import cast

import pytest

from llm.request import Delta, Event, Failed, Finished, RequestError, SamplingParams
from preprocess.types import ImageError
from vlm.build import build_local_pipeline, engine_command
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.pipeline import ChatMessage, ImageFailed, ImageInput, Pipeline
from vlm.spec import ModelSpec
from vlm.train.drawing.documents import make_document
from workers.contract.engine_client import EngineUnavailable
from workers.local.engine_process import EngineProcess, serve
from workers.local.engine_runner import EngineRunner
from workers.local.preprocess_inline import InlinePreprocess
from workers.local.preprocess_pool import LocalPreprocess
from workers.local.progress import Progress

OPTIONS = EngineOptions(kv_cache_mb=32, backend="torch")
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    make_document("shapes", 10**9 + seed, 1.0)[0].save(buffer, "PNG")
    return buffer.getvalue()


def test_an_engine_whose_parent_left_before_it_was_up_ends_quietly() -> None:
    class Runner:
        def info(self) -> dict[str, str]:
            return {}

    handler = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    ours.close()
    try:
        with theirs:
            serve(theirs, cast(EngineRunner, Runner()), Progress())
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_of_the_terminal_does_not_reach_the_children() -> None:
    async def main() -> None:
        engine = EngineProcess([sys.executable, "-c", "import time; time.sleep(60)"])
        starting = asyncio.create_task(engine.start())
        decoders = LocalPreprocess(1)
        try:
            await decoders.start()
            while engine.pid is None:
                await asyncio.sleep(0.02)
            for pid in (engine.pid, *decoders.pids):
                assert os.getpgid(pid) == pid
        finally:
            starting.cancel()
            await engine.close()
            await decoders.close()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Pipeline, EngineProcess]]:
    engine = EngineProcess(engine_command(OPTIONS))
    pipeline = Pipeline(ModelSpec.load(DEFAULT_MODEL), InlinePreprocess(), engine)
    await pipeline.start()
    try:
        yield pipeline, engine
    finally:
        await pipeline.close()


async def ask(pipeline: Pipeline, name: str, data: bytes, params: SamplingParams) -> list[Event]:
    message = ChatMessage("user", (ImageInput(data), "What is in the image?"))
    return [event async for event in pipeline.run(pipeline.prepare(name, [message], params))]


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta))


async def until_ready(engine: EngineProcess) -> None:
    for _ in range(600):
        if engine.ready:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the engine did not come back")


@pytest.mark.slow
def test_answers_equal_those_of_the_engine_inside_this_process() -> None:
    async def main() -> None:
        local = build_local_pipeline(OPTIONS)
        await local.start()
        async with served() as (pipeline, _):
            for seed in range(3):
                params = SamplingParams(max_tokens=40)
                a = await ask(pipeline, f"a{seed}", picture(seed), params)
                b = await ask(local, f"b{seed}", picture(seed), params)
                assert text_of(a) == text_of(b) != ""
                assert a[-1].usage == b[-1].usage
        await local.close()

    asyncio.run(main())


def test_a_killed_engine_ends_every_stream_with_an_error_and_comes_back() -> None:
    """users.md S8: readiness goes down until the engine answers again."""

    async def main() -> None:
        async with served() as (pipeline, engine):
            streams = [asyncio.create_task(ask(pipeline, f"r{i}", picture(i), LONG)) for i in range(4)]
            while (await engine.stats())["engine"]["running"] < 4:
                await asyncio.sleep(0.02)
            first_pid = engine.pid
            os.kill(first_pid, signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*streams), 10)
            for events in ends:
                assert isinstance(events[-1], Failed)
                assert events[-1].code == "engine_died"
            assert not engine.ready
            with pytest.raises(EngineUnavailable):
                await ask(pipeline, "while-down", picture(9), LONG)
            await until_ready(engine)
            assert engine.pid != first_pid and engine.restarts == 1
            after = await ask(pipeline, "after", picture(0), SamplingParams(max_tokens=20))
            assert isinstance(after[-1], Finished) and text_of(after)

    asyncio.run(main())


@pytest.mark.slow
def test_a_stopped_engine_is_found_is_not_ready_and_is_replaced() -> None:
    """users.md S8: a process that exists but makes no progress is not healthy."""

    async def main() -> None:
        engine = EngineProcess(engine_command(OPTIONS), stall_s=2.0)
        pipeline = Pipeline(ModelSpec.load(DEFAULT_MODEL), InlinePreprocess(), engine)
        await pipeline.start()
        try:
            stopped = engine.pid
            os.kill(stopped, signal.SIGSTOP)
            events = await asyncio.wait_for(ask(pipeline, "r", picture(0), LONG), 60)
            assert isinstance(events[-1], Failed) and events[-1].code == "engine_died"
            assert not engine.ready
            await until_ready(engine)
            assert engine.pid != stopped
        finally:
            await pipeline.close()

    asyncio.run(main())


@pytest.mark.slow
def test_leaving_a_stream_cancels_the_request_in_the_engine() -> None:
    """users.md S4."""

    async def main() -> None:
        async with served() as (pipeline, engine):
            message = ChatMessage("user", (ImageInput(picture(1)), "Read the text."))
            stream = pipeline.run(pipeline.prepare("gone", [message], LONG))
            async for event in stream:
                if isinstance(event, Delta):
                    break
            await stream.aclose()
            for _ in range(100):
                stats = (await engine.stats())["engine"]
                if stats["running"] == 0:
                    break
                await asyncio.sleep(0.02)
            assert stats["running"] == stats["waiting"] == stats["kv_blocks_held"] == 0
            assert stats["cancelled"] == 1

    asyncio.run(main())


def test_one_new_image_asked_about_by_many_at_once_is_decoded_and_encoded_once() -> None:
    """users.md C6."""

    class Counting(InlinePreprocess):
        calls = 0

        async def tiles(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            return await super().tiles(*arguments, **keywords)

    async def main() -> None:
        engine = EngineProcess(engine_command(OPTIONS))
        pipeline = Pipeline(ModelSpec.load(DEFAULT_MODEL), Counting(), engine)
        await pipeline.start()
        try:
            params = SamplingParams(max_tokens=10)
            ends = await asyncio.gather(*(ask(pipeline, f"r{i}", picture(3), params) for i in range(20)))
            assert len({text_of(events) for events in ends}) == 1
            stats = await engine.stats()
            prompt = ends[0][-1].usage
            grid_tiles = prompt.image_tokens // pipeline.spec.geometry.tokens_per_tile
            assert Counting.calls == 1
            assert stats["encoder"]["tiles"] == grid_tiles
            # Whole shared blocks are computed once, the rest by each request.
            shared = (prompt.prompt_tokens - 1) // 16 * 16
            # A chunk's last single token counts as a decode.
            rest = 20 * (prompt.prompt_tokens - shared)
            assert shared + rest - 20 <= stats["engine"]["chunk_tokens"] <= shared + rest
        finally:
            await pipeline.close()

    asyncio.run(main())


def test_an_image_that_fails_ends_only_its_own_requests() -> None:
    class Failing(InlinePreprocess):
        async def tiles(self, data, *arguments, **keywords):  # type: ignore[no-untyped-def]
            if data == picture(5):
                raise ImageError("image_processing_failed", "The image could not be processed.")
            return await super().tiles(data, *arguments, **keywords)

    async def main() -> None:
        pipeline = build_local_pipeline(OPTIONS, preprocess=Failing())
        await pipeline.start()
        try:
            params = SamplingParams(max_tokens=10)
            bad, good = await asyncio.gather(
                ask(pipeline, "bad", picture(5), params), ask(pipeline, "good", picture(6), params)
            )
            told = ("image_processing_failed", "The image could not be processed.")
            assert bad == [ImageFailed("bad", *told, image=0)]
            assert isinstance(good[-1], Finished)
            again = await ask(pipeline, "again", picture(5), params)
            assert isinstance(again[-1], Failed)
        finally:
            await pipeline.close()

    asyncio.run(main())


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    """users.md P7, P9."""

    async def main() -> None:
        pipeline = build_local_pipeline(OPTIONS)
        message = ChatMessage("user", (*(ImageInput(picture(i)) for i in range(150)), "Compare."))
        with pytest.raises(RequestError) as error:
            pipeline.prepare("big", [message], LONG)
        assert error.value.code == "context_length_exceeded"
        assert "2048" in error.value.message and "of images" in error.value.message

    asyncio.run(main())
