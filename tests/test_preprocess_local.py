"""The local pool of decode processes: users.md D9, S3, S4, and what happens to a pool whose processes die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_stage import (
    LIMITS,
    SPEC,
    cpu_s,
    decoding_at_lower_priority,
    endless_image,
    png,
    slow_image,
    ticks_by_niceness,
)
from PIL import Image
from stage_calls import tiles_of
from waiting import until

from llm.request import Priority
from preprocess.stage import preprocess
from preprocess.types import ImageError, Tiles
from preprocess.wire import to_bytes, to_parts
from workers.children.child import Child
from workers.children.frames import Frame
from workers.contract.sealed_memory import seal
from workers.contract.stages import DecodeLimits, StageUnavailable, Urgency
from workers.local.preprocess_pool import DecodeProcess, LocalOptions, LocalPreprocess


@asynccontextmanager
async def pool(processes: int = 1, options: LocalOptions | None = None) -> AsyncIterator[LocalPreprocess]:
    stage = LocalPreprocess(processes, options)
    await stage.start()
    try:
        yield stage
    finally:
        pids = stage.pids
        await stage.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_tiles_are_those_of_the_stage_function() -> None:
    async def main() -> None:
        async with pool(processes=2) as stage:
            images = [png(seed, (30 + 40 * seed, 90)) for seed in range(6)]
            calls = [tiles_of(stage, image, SPEC, LIMITS, deadline_s=60) for image in images]
            for image, tiles in zip(images, await asyncio.gather(*calls), strict=True):
                expected = preprocess(image, SPEC)
                assert tiles.grid == expected.grid
                assert np.array_equal(tiles.pixels, expected.pixels)

    asyncio.run(main())


def test_d7_errors_come_back_typed_and_cost_no_process() -> None:
    async def main() -> None:
        async with pool() as stage:
            pids = stage.pids
            for data, code in ((png()[:-500], "invalid_image"), (b"<svg/>", "unsupported_image_format")):
                with pytest.raises(ImageError) as caught:
                    await tiles_of(stage, data, SPEC, LIMITS, deadline_s=60)
                assert caught.value.code == code
            assert stage.pids == pids and stage.restarts == 0

    asyncio.run(main())


def test_killed_process_is_replaced_and_its_image_tried_again() -> None:
    async def main() -> None:
        async with pool() as stage:
            (pid,) = stage.pids
            task = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=60))
            before = cpu_s(pid)
            await until(lambda: cpu_s(pid) > before + 0.1)
            os.kill(pid, signal.SIGKILL)
            assert (await task).pixels.shape[1:] == (32, 32, 3)
            assert stage.restarts == 1 and stage.pids != [pid]

    asyncio.run(main())


def shared_memories() -> int:
    """How many are open here."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd" in name for name in names)


def unsealed(data: bytes) -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    return descriptor


@pytest.mark.parametrize(
    "nonsense", ["another grid", "damaged", "no tiles", "no word", "unsealed", "a file", "sealed nonsense"]
)
def test_a_process_that_answers_something_else_is_replaced_and_its_image_tried_again(
    nonsense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of another grid would be encoded under this image's key, and memory that can shrink could end
    whoever reads it."""
    others, own = to_bytes(preprocess(png(size=(32, 32)), SPEC)), to_bytes(preprocess(png(), SPEC))
    memory = b"".join(to_parts(preprocess(png(), SPEC), is_sealed=True))
    answers: dict[str, Callable[[], Frame]] = {
        "another grid": lambda: Frame({"op": "tiles"}, others, None),
        "damaged": lambda: Frame({"op": "tiles"}, own[:-1], None),
        "no tiles": lambda: Frame({"op": "tiles"}, b"", None),
        "no word": lambda: Frame({}, b"", None),
        "unsealed": lambda: Frame({"op": "tiles"}, b"", unsealed(memory)),
        "a file": lambda: Frame({"op": "tiles"}, b"", os.open(__file__, os.O_RDONLY)),
        "sealed nonsense": lambda: Frame({"op": "tiles"}, b"", seal([memory[:-1]])),
    }

    async def main() -> None:
        async with pool() as stage:
            pids, receive, before = stage.pids, Child.receive, shared_memories()

            async def once(child: Child) -> Frame:
                os.close((await receive(child)).descriptor)
                monkeypatch.setattr(Child, "receive", receive)
                return answers[nonsense]()

            monkeypatch.setattr(Child, "receive", once)
            tiles = await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
            assert np.array_equal(tiles.pixels, preprocess(png(), SPEC).pixels)
            assert stage.pids != pids and stage.restarts == 1
            del tiles
            gc.collect()
            assert shared_memories() <= before

    asyncio.run(main())


def test_process_killed_while_idle_costs_nobody_an_answer() -> None:
    async def main() -> None:
        async with pool(processes=2) as stage:
            for pid in stage.pids:
                os.kill(pid, signal.SIGKILL)
            calls = [tiles_of(stage, png(seed), SPEC, LIMITS, deadline_s=60) for seed in range(4)]
            assert len(await asyncio.gather(*calls)) == 4
            assert len(stage.pids) == 2

    asyncio.run(main())


def test_a_system_without_room_for_a_process_costs_an_error_and_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with pool() as stage:
            os.kill(stage.pids[0], signal.SIGKILL)
            with monkeypatch.context() as full:
                full.setattr("workers.children.child.subprocess.Popen", no_room)
                for _ in range(3):
                    with pytest.raises(StageUnavailable):
                        await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
                assert stage.pids == []
            await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
            assert len(stage.pids) == 1

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    asyncio.run(main())


def has_ended(pid: int) -> bool:
    """All its threads are gone; its status waits to be read."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_more_processes_killed_while_idle_than_an_image_has_attempts_fail_no_image() -> None:
    async def main() -> None:
        async with pool(processes=4) as stage:
            before = stage.pids
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: all(has_ended(pid) for pid in before))
            assert (await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)).grid.num_tiles > 0
            assert stage.restarts == 1 and len(stage.pids) == 4

    asyncio.run(main())


def test_frozen_process_is_replaced() -> None:
    async def main() -> None:
        async with pool() as stage:
            (pid,) = stage.pids
            os.kill(pid, signal.SIGSTOP)
            tiles = await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=4)
            assert np.array_equal(tiles.pixels, preprocess(png(), SPEC).pixels)
            assert stage.restarts == 1

    asyncio.run(main())


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_decode_is_given_up_for_doing_nothing_not_for_being_slow(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """On a crowded machine a process gets on slowly, and its image is as good as any."""
    used = itertools.count()
    monkeypatch.setattr(DecodeProcess, "cpu_s", property(lambda _: next(used) if is_busy else 0))

    async def main() -> None:
        async with pool() as stage:
            monkeypatch.setattr(stage, "_attempt", functools.partial(quick_to_judge, stage._attempt))
            tiles = tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=600)
            with contextlib.nullcontext() if is_busy else pytest.raises((ImageError, StageUnavailable)):
                await tiles
            assert is_busy == (stage.restarts == 0)

    async def quick_to_judge(attempt: Any, *arguments: Any, hang_s: float) -> Tiles:
        return await attempt(*arguments, hang_s=0.02)

    asyncio.run(main())


@pytest.mark.slow
def test_d9_image_that_decodes_for_ever_ends_after_three_attempts() -> None:
    async def main() -> None:
        async with pool(options=LocalOptions(limits=DecodeLimits(cpu_s=1))) as stage:
            with pytest.raises(ImageError) as caught:
                await tiles_of(stage, endless_image(), SPEC, LIMITS, deadline_s=100)
            assert caught.value.code == "image_processing_failed"
            assert stage.restarts == 3
            assert (await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)).grid.num_tiles > 0

    asyncio.run(main())


def test_d9_image_that_needs_too_much_memory_ends_after_three_attempts() -> None:
    async def main() -> None:
        out = io.BytesIO()
        Image.new("RGB", (6000, 6000)).save(out, "PNG", compress_level=1)
        async with pool(options=LocalOptions(limits=DecodeLimits(memory_bytes=100 << 20))) as stage:
            with pytest.raises(ImageError) as caught:
                await tiles_of(stage, out.getvalue(), SPEC, LIMITS, deadline_s=100)
            assert caught.value.code == "image_processing_failed"
            assert stage.restarts == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("processes", "priority", "lower"), [(2, "interactive", False), (2, "batch", True), (1, "batch", False)]
)
def test_batch_images_are_decoded_at_lower_priority_where_no_interactive_one_waits_for_them(
    processes: int, priority: Priority, lower: bool
) -> None:
    async def main() -> None:
        async with pool(processes) as stage:
            with decoding_at_lower_priority(stage.pids, lower):
                await tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=60, urgency=Urgency(priority))

    asyncio.run(main())


def test_a_batch_image_whose_decoder_died_is_tried_again_at_full_priority() -> None:
    async def main() -> None:
        async with pool(processes=2) as stage:
            before = {pid: cpu_s(pid) for pid in stage.pids}
            image = tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=60, urgency=Urgency("batch"))
            task = asyncio.create_task(image)
            busy = lambda: [pid for pid in before if cpu_s(pid) > before[pid] + 0.1]  # noqa: E731
            await until(lambda: bool(busy()))
            os.kill(busy()[0], signal.SIGKILL)
            assert (await task).grid.num_tiles > 0
            (other,) = set(before) & set(stage.pids)
            successors = set(stage.pids) - set(before)
            ticks = ticks_by_niceness([other, *successors])
            usual = ticks.pop(os.getpriority(os.PRIO_PROCESS, 0))
            assert usual > 20 * sum(ticks.values())

    asyncio.run(main())


def test_deadline_ends_the_wait_and_the_pool_recovers() -> None:
    async def main() -> None:
        async with pool() as stage:
            busy = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=60))
            await asyncio.sleep(0.05)
            started = time.monotonic()
            with pytest.raises(StageUnavailable) as caught:
                await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=0.1)
            assert caught.value.code == "preprocessing_timeout"
            assert time.monotonic() - started < 30
            await busy
            await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
            assert stage.restarts == 0

    asyncio.run(main())


def test_s4_caller_who_leaves_frees_the_pool_without_a_restart() -> None:
    async def main() -> None:
        async with pool() as stage:
            (pid,) = stage.pids
            gone = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=60))
            before = cpu_s(pid)
            await until(lambda: cpu_s(pid) > before + 0.1)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
            assert stage.restarts == 0 and stage.pids == [pid]

    asyncio.run(main())


def test_more_images_than_may_wait_are_refused_at_once() -> None:
    async def main() -> None:
        async with pool(options=LocalOptions(max_waiting=2)) as stage:
            calls = [tiles_of(stage, png(seed), SPEC, LIMITS, deadline_s=60) for seed in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [result for result in results if isinstance(result, StageUnavailable)]
            assert [error.code for error in refused] == ["preprocessing_overloaded"]

    asyncio.run(main())


def test_decode_process_never_loads_torch_and_starts_small() -> None:
    code = (
        "import sys, workers.local.decode_process, workers.local.preprocess_pool;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'celery', 'redis')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
