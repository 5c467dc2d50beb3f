"""The ledger of leases and attempts, and a task's behaviour at every wrong moment."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import redis
from PIL import Image

import workers.cluster.ledger
from llm.request import Priority
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess, tiles_key
from preprocess.tiling import Idefics3Tiling
from preprocess.wire import from_bytes
from workers.cluster.blobs import BlobStore, MemoryBlobStore, open_store
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import TilesJob
from workers.cluster.redis_client import connect
from workers.cluster.single_flight import Judged, Lease, Waiter, Waiters
from workers.cluster.worker.tasks import run_tiles_job
from workers.contract.stages import MAX_ATTEMPTS
from workers.contract.streams import end_tasks

pytestmark = pytest.mark.redis

SPEC = PreprocessSpec(Idefics3Tiling(tile_size=16, longest_edge=32))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture
def ledger(client: redis.Redis) -> WorkLedger:
    return WorkLedger(client, "test")


@pytest.fixture
def store(redis_url: str) -> Iterator[BlobStore]:
    store = open_store(redis_url)
    yield store
    store.close()


def image() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(out, "PNG")
    return out.getvalue()


def job_for(data: bytes) -> TilesJob:
    digest = hashlib.sha256(data).hexdigest()
    return TilesJob(tiles_key(digest, SPEC), digest, SPEC.to_json(), ImageLimits().to_json(), 0, 60)


def test_work_that_nobody_wants_is_not_begun(ledger: WorkLedger) -> None:
    assert ledger.begin("k", "t", 3) == "unwanted"
    ledger.look("k", "waiter")
    assert ledger.begin("k", "t", 3) == "begun"


def test_last_waiter_to_leave_knows_it(ledger: WorkLedger) -> None:
    ledger.look("k", "a")
    ledger.look("k", "b")
    assert ledger.leave("k", "a") == 1
    assert ledger.leave("k", "b") == 0
    assert ledger.begin("k", "t", 3) == "unwanted"


def test_work_under_a_lease_is_not_begun_twice(ledger: WorkLedger) -> None:
    ledger.look("k", "waiter")
    assert ledger.begin("k", "one", 3) == "begun"
    assert ledger.look("k", "waiter").running
    assert ledger.begin("k", "two", 3) == "running"
    ledger.end("k", "two", "done")
    assert ledger.look("k", "waiter").running
    ledger.end("k", "one", "failed")
    assert not ledger.look("k", "waiter").running


def test_lease_without_a_heartbeat_ends_and_with_one_lasts(
    ledger: WorkLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.cluster.ledger, "LEASE_S", 0.4)
    monkeypatch.setattr("workers.cluster.single_flight.HEARTBEAT_S", 0.05)
    ledger.look("k", "waiter")
    lease = Lease.take(ledger, "k", ("code", "Text."))
    assert lease is not None
    with lease:
        time.sleep(0.8)
        assert ledger.look("k", "waiter").running
    assert ledger.begin("k", "one that dies", 3) == "begun"
    deadline = time.monotonic() + 10
    while ledger.look("k", "waiter").running:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_heartbeat_takes_a_forgotten_lease_again_but_never_anothers(ledger: WorkLedger) -> None:
    ledger.beat("k", "mine")
    assert ledger.look("k", "waiter").running
    assert ledger.begin("k", "other", 3) == "running"
    ledger.beat("k", "other")
    ledger.end("k", "mine", "failed")
    assert not ledger.look("k", "waiter").running


def test_attempts_count_deaths_and_end(ledger: WorkLedger) -> None:
    ledger.look("k", "waiter")
    for number in range(MAX_ATTEMPTS):
        assert ledger.begin("k", "t", MAX_ATTEMPTS) == "begun"
        ledger.end("k", "t", "failed")
        assert ledger.look("k", "waiter").attempts == number + 1
    assert ledger.begin("k", "t", MAX_ATTEMPTS) == "exhausted"


@pytest.mark.parametrize("outcome", ["done", "undone"])
def test_attempt_that_was_no_death_is_not_counted(
    ledger: WorkLedger, outcome: workers.cluster.ledger.Outcome
) -> None:
    ledger.look("k", "waiter")
    ledger.begin("k", "t", 3)
    ledger.end("k", "t", outcome)
    assert ledger.look("k", "waiter").attempts == 0


def test_one_of_many_claims_the_message_until_it_is_taken_up(ledger: WorkLedger) -> None:
    assert [ledger.claim("k") for _ in range(3)] == [True, False, False]
    wishes: list[Priority] = ["batch", "batch", "interactive", "batch", "interactive"]
    assert [ledger.claim("b", wish) for wish in wishes] == [True, False, True, False, False]
    ledger.look("k", "waiter")
    ledger.begin("k", "t", 3)
    assert ledger.claim("k")
    ledger.unclaim("k")
    assert ledger.claim("k")


def test_a_verdict_is_for_those_who_waited_and_nobody_else(ledger: WorkLedger, client: redis.Redis) -> None:
    for waiter in ("a", "b"):
        ledger.look("k", waiter)
    ledger.fail("k", "invalid_image", "Text.")
    assert ledger.begin("k", "t", 3) == "unwanted"
    assert ledger.look("k", "late").verdict is None
    assert ledger.begin("k", "t", 3) == "begun"
    for waiter in ("a", "b"):
        assert ledger.look("k", waiter).verdict == ("invalid_image", "Text.")
        assert ledger.leave("k", waiter) == 1
    assert not client.keys("vlm:test:verdict:*")
    assert ledger.look("k", "a").verdict is None


def test_attempts_end_with_those_who_waited(ledger: WorkLedger) -> None:
    def use_up(waiter: str) -> None:
        assert ledger.look("k", waiter).attempts == 0
        for _ in range(MAX_ATTEMPTS):
            assert ledger.begin("k", "t", MAX_ATTEMPTS) == "begun"
            ledger.end("k", "t", "failed")
        assert ledger.look("k", waiter).attempts == MAX_ATTEMPTS

    use_up("first")
    ledger.leave("k", "first")
    use_up("second")
    ledger.fail("k", "image_processing_failed", "Text.")
    use_up("third")


class Scene:
    """Waiters for one key, the messages they send and the result that they find."""

    def __init__(self, ledger: WorkLedger, redis_url: str) -> None:
        self.waiters = Waiters(ledger, redis_url)
        self.sent = 0
        self.found: str | None = None

    def waiter(self) -> Waiter:
        waiter = Waiter(self.waiters)
        waiter.join("k")
        return waiter

    def advance(self, waiter: Waiter) -> str | None:
        def send() -> None:
            self.sent += 1

        return waiter.advance("k", lambda: self.found, send, ("exhausted", "Text."))


@pytest.fixture
def scene(ledger: WorkLedger, redis_url: str) -> Scene:
    return Scene(ledger, redis_url)


def test_waiters_send_one_message_and_another_when_whoever_took_it_up_dies(
    ledger: WorkLedger, scene: Scene
) -> None:
    first, second = scene.waiter(), scene.waiter()
    for waiter in (first, second, first, second):
        assert scene.advance(waiter) is None
    assert scene.sent == 1
    for attempt in range(MAX_ATTEMPTS):
        assert ledger.begin("k", "one that dies", MAX_ATTEMPTS) == "begun"
        assert scene.advance(first) is None and scene.sent == 1 + attempt
        ledger.end("k", "one that dies", "failed")
        if attempt + 1 < MAX_ATTEMPTS:
            assert scene.advance(second) is None and scene.sent == 2 + attempt
    for waiter in (first, second):
        with pytest.raises(Judged, match="Text"):
            scene.advance(waiter)
    assert scene.advance(second) is None and scene.sent == 1 + MAX_ATTEMPTS  # it waits anew


def test_a_result_is_looked_for_once_its_maker_has_ended(ledger: WorkLedger, scene: Scene) -> None:
    waiter = scene.waiter()
    scene.advance(waiter)
    lease = Lease.take(ledger, "k", ("exhausted", "Text."))
    assert lease is not None and Lease.take(ledger, "k", ("exhausted", "Text.")) is None
    scene.found = "half of it"
    assert scene.advance(waiter) is None
    scene.found = "all of it"
    lease.end("done")
    assert scene.advance(waiter) == "all of it" and scene.sent == 1


def test_a_message_that_could_not_be_sent_is_sent_by_the_next(ledger: WorkLedger, scene: Scene) -> None:
    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        scene.waiter().advance("k", lambda: None, fail, ("exhausted", "Text."))
    scene.advance(scene.waiter())
    assert scene.sent == 1


def test_the_last_waiter_to_leave_knows_it_and_one_that_never_asked_is_none(scene: Scene) -> None:
    waiters = [scene.waiter(), scene.waiter()]
    for waiter in waiters:
        scene.advance(waiter)
    assert not Waiter(scene.waiters).leave_ledger()
    assert [waiter.leave_ledger() for waiter in waiters] == [False, True]


def test_waiters_are_woken_when_the_work_ends(ledger: WorkLedger, scene: Scene) -> None:
    async def woken() -> None:
        listener = asyncio.create_task(scene.waiters.listen())
        waiter, other = scene.waiter(), Waiter(scene.waiters)
        other.join("another key")
        try:
            async with asyncio.timeout(30):
                while not waiter.woken.is_set():  # the listener may not be connected yet
                    await asyncio.to_thread(ledger.announce, "k")
                    await asyncio.sleep(0.02)
            assert not other.woken.is_set()
            await waiter.pause()
            waiter.leave()
            await asyncio.to_thread(ledger.announce, "k")
            await asyncio.to_thread(ledger.announce, "another key")
            async with asyncio.timeout(30):
                await other.woken.wait()
            assert not waiter.woken.is_set()
        finally:
            await end_tasks(listener)

    asyncio.run(woken())


def test_message_delivered_many_times_at_once_is_worked_on_once(ledger: WorkLedger, store: BlobStore) -> None:
    data = image()
    job = job_for(data)
    reads: list[str] = []

    class CountingStore(MemoryBlobStore):
        def get(self, key: str) -> bytes | None:
            reads.append(key)
            time.sleep(0.3)  # others arrive meanwhile
            return super().get(key)

    counting = CountingStore()
    counting.put(job.image_blob, data, 60)
    ledger.look(job.key, "waiter")
    threads = [threading.Thread(target=run_tiles_job, args=(job, counting, ledger)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_tiles_job(job, counting, ledger)
    assert reads == [job.image_blob]
    state = ledger.look(job.key, "waiter")
    assert not state.running and state.attempts == 0
    payload = counting.get(job.tiles_blob)
    assert payload is not None
    assert np.array_equal(from_bytes(payload).pixels, preprocess(data, SPEC).pixels)


def test_message_that_comes_too_late_does_nothing(ledger: WorkLedger, store: BlobStore) -> None:
    data = image()
    job = job_for(data)
    store.put(job.image_blob, data, 60)
    run_tiles_job(job, store, ledger)
    assert not store.exists(job.tiles_blob)


def test_lost_image_costs_no_attempt(ledger: WorkLedger, store: BlobStore) -> None:
    job = job_for(image())
    ledger.look(job.key, "waiter")
    run_tiles_job(job, store, ledger)
    state = ledger.look(job.key, "waiter")
    assert state.attempts == 0 and state.verdict is None and not state.running
    assert ledger.claim(job.key)


def test_bytes_that_are_not_the_image_of_their_digest_are_as_good_as_lost(
    ledger: WorkLedger, store: BlobStore
) -> None:
    """Their tiles would be kept under the key of the image that was meant."""
    other = io.BytesIO()
    Image.new("RGB", (40, 30), "blue").save(other, "PNG")
    job = job_for(image())
    store.put(job.image_blob, other.getvalue(), 60)
    ledger.look(job.key, "waiter")
    run_tiles_job(job, store, ledger)
    assert not store.exists(job.tiles_blob) and not store.exists(job.image_blob)
    assert ledger.look(job.key, "waiter").attempts == 0


def test_damaged_image_is_a_verdict_not_an_attempt(ledger: WorkLedger, store: BlobStore) -> None:
    data = image()[:60]
    job = job_for(data)
    store.put(job.image_blob, data, 60)
    ledger.look(job.key, "waiter")
    run_tiles_job(job, store, ledger)
    state = ledger.look(job.key, "waiter")
    assert state.verdict is not None and state.verdict[0] == "invalid_image"
    assert state.attempts == 0 and not state.running


def test_store_that_is_full_of_other_things_is_told_to_whoever_waits(
    ledger: WorkLedger, redis_url: str
) -> None:
    data = image()
    job = job_for(data)
    store = open_store(redis_url, cap_bytes=len(data) + 100)
    store.put(job.image_blob, data, 60)
    ledger.look(job.key, "waiter")
    run_tiles_job(job, store, ledger)
    state = ledger.look(job.key, "waiter")
    assert state.verdict is not None and state.verdict[0] == "preprocessing_overloaded"
    store.close()


def test_exhausted_work_gets_its_verdict_from_whoever_notices(ledger: WorkLedger, store: BlobStore) -> None:
    job = job_for(image())
    ledger.look(job.key, "waiter")
    for _ in range(MAX_ATTEMPTS):
        ledger.begin(job.key, "t", MAX_ATTEMPTS)
        ledger.end(job.key, "t", "failed")
    run_tiles_job(job, store, ledger)
    verdict = ledger.look(job.key, "waiter").verdict
    assert verdict is not None and verdict[0] == "image_processing_failed"
