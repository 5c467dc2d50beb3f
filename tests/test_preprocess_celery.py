"""The Celery twin of the preprocess stage, over a real Redis and real workers, and what it survives."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from celery_worker import WorkerProcess, celery_worker
from conftest import RedisServer
from decode_stage import LIMITS, SPEC, cpu_s, png, slow_image
from hostile_images import many_scan_jpeg
from PIL import Image
from stage_calls import tiles_of
from waiting import until

from llm.request import Priority
from preprocess.probe import probe
from preprocess.stage import preprocess, tiles_key
from preprocess.types import ImageError, Tiles
from preprocess.wire import to_bytes
from workers.cluster.blobs import MemoryBlobStore, open_store
from workers.cluster.celery_app import PREPROCESS_QUEUE
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import tiles_blob
from workers.cluster.node.preprocess_celery import CeleryPreprocess
from workers.cluster.node.stored_tiles import StoredTiles
from workers.cluster.queue_stats import QueueStats
from workers.cluster.redis_client import connect
from workers.contract.stages import DecodeLimits, StageUnavailable, Urgency
from workers.contract.tiles_handle import TilesLost

pytestmark = pytest.mark.redis


@asynccontextmanager
async def stage_at(url: str, limits: DecodeLimits | None = None) -> AsyncIterator[CeleryPreprocess]:
    stage = CeleryPreprocess(url, url, limits)
    await stage.start()
    try:
        yield stage
    finally:
        await stage.close()


@pytest.fixture
def worker(redis_url: str) -> Iterator[WorkerProcess]:
    with celery_worker(redis_url) as process:
        yield process


async def until_decoding(worker: WorkerProcess) -> int:
    """The pid of the child that is in the middle of it."""
    (pid,) = worker.child_pids
    before = cpu_s(pid)
    await until(lambda: cpu_s(pid) > before + 0.15)
    return pid


def test_tiles_and_errors_are_those_of_the_stage_function_and_nothing_stays(
    redis_url: str, worker: WorkerProcess
) -> None:
    async def main() -> None:
        async with stage_at(redis_url) as stage:
            images = [png(seed, (30 + 40 * seed, 90)) for seed in range(6)]
            calls = [tiles_of(stage, image, SPEC, LIMITS, deadline_s=60) for image in images]
            for image, tiles in zip(images, await asyncio.gather(*calls), strict=True):
                expected = preprocess(image, SPEC)
                assert tiles.grid == expected.grid
                assert np.array_equal(tiles.pixels, expected.pixels)
            for data, code in ((png()[:-500], "invalid_image"), (b"<svg/>", "unsupported_image_format")):
                with pytest.raises(ImageError) as caught:
                    await tiles_of(stage, data, SPEC, LIMITS, deadline_s=60)
                assert caught.value.code == code
        store = open_store(redis_url)
        assert store.used_bytes() == 0
        store.close()

    asyncio.run(main())


def test_tiles_stay_in_the_store_until_they_are_given_back(redis_url: str, worker: WorkerProcess) -> None:
    """The node itself reads none of them: whoever encodes them does."""

    async def main() -> None:
        data, store = png(), open_store(redis_url)
        async with stage_at(redis_url) as stage:
            tiles = await stage.tiles(data, probe(data), SPEC, LIMITS, deadline_s=60)
            assert isinstance(tiles, StoredTiles)
            wire = store.get(tiles.blob)
            assert wire == to_bytes(preprocess(data, SPEC))
            tiles.close()
            await until(lambda: not store.exists(tiles.blob))
        assert store.used_bytes() == 0
        store.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["gone", "damaged", "another grid"])
def test_tiles_that_are_lost_or_not_their_own_say_so_and_leave_the_store(how: str) -> None:
    store, made = MemoryBlobStore(), preprocess(png(), SPEC)
    other = to_bytes(preprocess(png(size=(32, 32)), SPEC))
    if how != "gone":
        store.put("blob", other if how == "another grid" else to_bytes(made)[:-1] + b"?", 60)
    tiles = StoredTiles(store, "url", "blob", made.grid, lambda: None)
    with pytest.raises(TilesLost):
        tiles.open()
    assert not store.exists("blob")
    with pytest.raises(TilesLost):
        tiles.renew()


def test_tiles_of_another_grid_under_an_images_key_are_made_anew(
    redis_url: str, worker: WorkerProcess
) -> None:
    async def main() -> None:
        data, store = png(), open_store(redis_url)
        wrong = preprocess(png(size=(32, 32)), SPEC)
        blob = tiles_blob(tiles_key(hashlib.sha256(data).hexdigest(), SPEC))
        store.put(blob, to_bytes(wrong), 60)
        async with stage_at(redis_url) as stage:
            tiles = await tiles_of(stage, data, SPEC, LIMITS, deadline_s=60)
        assert tiles.grid != wrong.grid and np.array_equal(tiles.pixels, preprocess(data, SPEC).pixels)
        store.close()

    asyncio.run(main())


def test_workers_that_cut_another_grid_are_no_fault_of_the_image(redis_url: str) -> None:
    """They may be of another version; each of their results is a miss, and the end is a 503."""

    async def main() -> None:
        data, store = png(), open_store(redis_url)
        key = tiles_key(hashlib.sha256(data).hexdigest(), SPEC)
        wrong = to_bytes(preprocess(png(size=(32, 32)), SPEC))
        client = connect(redis_url)
        ledger = WorkLedger(client, PREPROCESS_QUEUE)
        async with stage_at(redis_url) as stage:
            task = asyncio.create_task(tiles_of(stage, data, SPEC, LIMITS, deadline_s=60))
            while not task.done():
                if await asyncio.to_thread(ledger.begin, key, "old", 3) == "begun":
                    store.put(tiles_blob(key), wrong, 60)
                    ledger.end(key, "old", "done")
                await asyncio.sleep(0.01)
            with pytest.raises(StageUnavailable) as caught:
                await task
            assert caught.value.code == "preprocessing_unavailable"
        store.close()
        client.close()

    asyncio.run(main())


def test_message_is_small_json_and_carries_no_image(redis_url: str) -> None:
    async def main() -> None:
        data = png(size=(400, 300))
        async with stage_at(redis_url) as stage:
            with pytest.raises(StageUnavailable) as caught:
                await tiles_of(stage, data, SPEC, LIMITS, deadline_s=1)
            assert caught.value.code == "preprocessing_timeout"
        client = connect(redis_url)
        (raw,) = client.lrange(PREPROCESS_QUEUE, 0, -1)
        client.close()
        message = json.loads(raw)
        body = json.loads(base64.b64decode(message["body"]))
        assert message["content-type"] == "application/json" and len(raw) < 4_000 < len(data)
        assert body[1]["spec"] == SPEC.to_json()

    asyncio.run(main())


@pytest.mark.slow
def test_waiters_on_many_nodes_share_one_decode(redis_url: str, worker: WorkerProcess) -> None:
    async def main() -> None:
        data = slow_image()
        async with stage_at(redis_url) as first, stage_at(redis_url) as second:
            before = cpu_s(worker.child_pids[0])
            await tiles_of(first, many_scan_jpeg(4096, 501), SPEC, LIMITS, deadline_s=100)
            alone = cpu_s(worker.child_pids[0]) - before
            calls = [tiles_of(stage, data, SPEC, LIMITS, deadline_s=100) for stage in (first, second) * 3]
            results = await asyncio.gather(*calls)
            assert all(np.array_equal(tiles.pixels, results[0].pixels) for tiles in results)
            assert cpu_s(worker.child_pids[0]) - before < 3.5 * alone

    asyncio.run(main())


def test_decode_process_killed_in_mid_task_costs_an_attempt_not_the_answer(
    redis_url: str, worker: WorkerProcess
) -> None:
    async def main() -> None:
        async with stage_at(redis_url) as stage:
            task = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=100))
            os.kill(await until_decoding(worker), signal.SIGKILL)
            assert (await task).pixels.shape[1:] == (32, 32, 3)

    asyncio.run(main())


@pytest.mark.slow
def test_worker_killed_in_mid_task_is_followed_by_another(redis_url: str) -> None:
    async def main() -> None:
        async with stage_at(redis_url) as stage:
            with celery_worker(redis_url) as worker:
                task = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=100))
                await until_decoding(worker)
                worker.kill()
            assert not task.done()
            with celery_worker(redis_url):
                assert (await task).pixels.shape[1:] == (32, 32, 3)

    asyncio.run(main())


@pytest.mark.slow
def test_d9_poison_image_ends_after_three_attempts_and_the_worker_lives(redis_url: str) -> None:
    async def main() -> None:
        out = io.BytesIO()
        Image.new("RGB", (6000, 6000)).save(out, "PNG", compress_level=1)
        poison = out.getvalue()
        with celery_worker(redis_url, limits=DecodeLimits(memory_bytes=100 << 20)) as worker:
            async with stage_at(redis_url) as stage:
                task = asyncio.create_task(tiles_of(stage, poison, SPEC, LIMITS, deadline_s=100))
                pids: set[int] = set()
                while not task.done():
                    pids.update(worker.child_pids)
                    await asyncio.sleep(0.02)
                with pytest.raises(ImageError) as caught:
                    await task
                assert caught.value.code == "image_processing_failed"
                await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
                assert len(pids | set(worker.child_pids)) == 4  # three died of it, the fourth serves on

    asyncio.run(main())


@pytest.mark.slow
def test_d9_image_that_decodes_for_ever_ends_after_three_attempts(
    redis_url: str, worker: WorkerProcess
) -> None:
    async def main() -> None:
        async with stage_at(redis_url, DecodeLimits(cpu_s=1)) as stage:
            with pytest.raises(ImageError) as caught:
                await tiles_of(stage, many_scan_jpeg(4096, 60_000), SPEC, LIMITS, deadline_s=100)
            assert caught.value.code == "image_processing_failed"
            await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)

    asyncio.run(main())


def test_s7_interactive_images_pass_the_batch_images_in_the_queue(redis_url: str) -> None:
    async def main() -> None:
        client = connect(redis_url)
        length = lambda: QueueStats(client).read([])[PREPROCESS_QUEUE]["length"]  # noqa: E731
        async with stage_at(redis_url) as stage:

            def ask(data: bytes, priority: Priority) -> asyncio.Task[Tiles]:
                return asyncio.create_task(
                    tiles_of(stage, data, SPEC, LIMITS, deadline_s=100, urgency=Urgency(priority))
                )

            batch = [ask(many_scan_jpeg(4096, 8000 + number), "batch") for number in range(2)]
            await until(lambda: length() == 2)
            interactive = ask(png(), "interactive")
            await until(lambda: length() == 3)
            with celery_worker(redis_url, concurrency=1):
                await interactive
                assert not any(task.done() for task in batch)
                for task in batch:
                    task.cancel()
                await asyncio.gather(*batch, return_exceptions=True)
        client.close()

    asyncio.run(main())


@pytest.mark.parametrize("why", ["joined", "aged"])
def test_s7_a_batch_image_is_sent_among_the_interactive_once_one_joins_it_or_it_has_aged(
    redis_url: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client = connect(redis_url)
        urgencies = [Urgency("batch") for _ in range(3)]
        async with stage_at(redis_url) as stage:
            images = [many_scan_jpeg(4096, 8000), many_scan_jpeg(4096, 8001), png()]
            asked = [
                asyncio.create_task(tiles_of(stage, image, SPEC, LIMITS, deadline_s=100, urgency=urgency))
                for image, urgency in zip(images, urgencies, strict=True)
            ]
            await until(lambda: QueueStats(client).read([])[PREPROCESS_QUEUE]["length"] == 3)
            assert client.llen(PREPROCESS_QUEUE) == 0  # the list of interactive messages
            if why == "joined":
                urgencies[2].priority = "interactive"
                await until(lambda: client.llen(PREPROCESS_QUEUE) == 1)
                with celery_worker(redis_url, concurrency=1):
                    await asked[2]
                    assert not asked[0].done() and not asked[1].done()
            else:
                monkeypatch.setattr("workers.cluster.node.preprocess_celery.AGEING_S", 0.0)
                await until(lambda: client.llen(PREPROCESS_QUEUE) == 3)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        client.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["stopped", "frozen"])
def test_redis_away_for_five_seconds_loses_nothing(redis_server: RedisServer, outage: str) -> None:
    async def main() -> None:
        begin, end = {
            "stopped": (redis_server.stop, redis_server.start),
            "frozen": (redis_server.freeze, redis_server.thaw),
        }[outage]
        with celery_worker(redis_server.url) as worker:
            async with stage_at(redis_server.url) as stage:
                running = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=100))
                await until_decoding(worker)
                queued = [
                    asyncio.create_task(tiles_of(stage, png(seed), SPEC, LIMITS, deadline_s=100))
                    for seed in range(5)
                ]
                await asyncio.sleep(0.1)
                await asyncio.to_thread(begin)
                late = [
                    asyncio.create_task(tiles_of(stage, png(seed), SPEC, LIMITS, deadline_s=100))
                    for seed in range(5, 10)
                ]
                await asyncio.sleep(5)
                await asyncio.to_thread(end)
                results = await asyncio.gather(running, *queued, *late)
                for seed, tiles in enumerate(results[1:]):
                    assert np.array_equal(tiles.pixels, preprocess(png(seed), SPEC).pixels)

    asyncio.run(main())


def test_deadline_holds_while_redis_is_away(redis_server: RedisServer) -> None:
    async def main() -> None:
        redis_server.stop()
        async with stage_at(redis_server.url) as stage:
            started = time.monotonic()
            with pytest.raises(StageUnavailable) as caught:
                await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=1)
            assert caught.value.code == "preprocessing_unavailable"
            assert time.monotonic() - started < 20

    asyncio.run(main())


@pytest.mark.slow
def test_stopped_worker_finishes_what_it_has(redis_url: str) -> None:
    async def main() -> None:
        with celery_worker(redis_url) as worker:
            async with stage_at(redis_url) as stage:
                task = asyncio.create_task(tiles_of(stage, slow_image(), SPEC, LIMITS, deadline_s=100))
                await until_decoding(worker)
                stopping = threading.Thread(target=worker.stop)
                stopping.start()
                assert (await task).grid.num_tiles > 0
                await asyncio.to_thread(stopping.join)

    asyncio.run(main())


def test_full_store_is_told_at_once(redis_url: str) -> None:
    async def main() -> None:
        store = open_store(redis_url)
        async with stage_at(redis_url) as stage:
            stage._store = open_store(redis_url, cap_bytes=100)
            with pytest.raises(StageUnavailable) as caught:
                await tiles_of(stage, png(), SPEC, LIMITS, deadline_s=60)
            assert caught.value.code == "preprocessing_overloaded"
        store.close()

    asyncio.run(main())


def test_worker_never_loads_torch() -> None:
    code = (
        "import sys, workers.cluster.worker.preprocess_worker;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
