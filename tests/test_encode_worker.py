"""The encode worker's task: tiles of many tasks in one batch, deadlines, and every ending of an attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from preprocess.types import TileGrid, Tiles
from preprocess.wire import to_bytes
from workers.cluster.blobs import MemoryBlobStore
from workers.cluster.ledger import WorkLedger
from workers.cluster.names import ROWS_HEADER, EncodeJob, task_headers
from workers.cluster.redis_client import connect
from workers.cluster.visual_store import VisualStore
from workers.cluster.worker.encode_worker import EncodeFailed, EncodeService, Unwanted, run_encode_job
from workers.contract.visual_format import VisualFormat

FORM = VisualFormat("revision", "float32", 4)
KEY = "a" * 64


class FakeEncoder:
    """Two tokens per tile that carry the tile's mean; may be held up, and may fail."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.started = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.broken = False

    def encode(self, images: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.started.set()
        self.go.wait(30)
        self.batches.append(sum(len(tiles) for tiles in images))
        if self.broken:
            raise RuntimeError("broken")
        return [torch.full((2 * len(tiles), 4), float(tiles.mean())) for tiles in images]


def two_rows(tiles: np.ndarray) -> int:
    return 2 * len(tiles)


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def service(encoder: FakeEncoder) -> Iterator[EncodeService]:
    made = EncodeService(
        lambda _: TileBatcher(encoder.encode, VisualCache(1 << 20), num_rows=two_rows, max_tiles=8),
        on_crash=lambda: None,
    )
    made.start()
    yield made
    encoder.go.set()
    made.close()


@pytest.fixture
def ledger(redis_url: str) -> Iterator[WorkLedger]:
    client = connect(redis_url)
    yield WorkLedger(client, "encode")
    client.close()


def made(value: int) -> Tiles:
    return Tiles(np.full((1, 8, 8, 3), value, np.uint8), TileGrid(0, 0, True, 8, 8))


def a_job(**changes: Any) -> EncodeJob:
    return replace(EncodeJob(KEY, "revision", "float32", "tiles", 30.0, time.time()), **changes)


class Scene:
    """One key with its tiles in the store and a waiter in the ledger."""

    def __init__(self, service: EncodeService, ledger: WorkLedger) -> None:
        self.service, self.ledger = service, ledger
        self.blobs = MemoryBlobStore()
        self.level2 = VisualStore(MemoryBlobStore(), FORM)
        self.name = FORM.entry(KEY)
        self.blobs.put("tiles", to_bytes(made(3)), 60)
        ledger.look(self.name, "waiter")

    def run(self, job: EncodeJob, num_rows: int = 0) -> None:
        headers = task_headers(job.sent_at, **{ROWS_HEADER: num_rows})
        run_encode_job(job, self.service, self.blobs, self.level2, self.ledger, headers)


@pytest.fixture
def scene(service: EncodeService, ledger: WorkLedger) -> Scene:
    return Scene(service, ledger)


def test_tasks_that_wait_together_are_encoded_together(service: EncodeService, encoder: FakeEncoder) -> None:
    encoder.go.clear()
    with ThreadPoolExecutor(6) as tasks:
        first = tasks.submit(service.encode, "first", made(9))
        assert encoder.started.wait(30)
        rest = [tasks.submit(service.encode, f"{number}", made(number)) for number in range(5)]
        time.sleep(0.2)
        encoder.go.set()
        assert first.result()[0, 0] == 9
        assert [future.result()[0, 0].item() for future in rest] == [0, 1, 2, 3, 4]
    assert sum(encoder.batches) == 6 and len(encoder.batches) < 6


def test_one_key_asked_twice_is_encoded_once(service: EncodeService, encoder: FakeEncoder) -> None:
    encoder.go.clear()
    with ThreadPoolExecutor(2) as tasks:
        both = [tasks.submit(service.encode, KEY, made(5)) for _ in range(2)]
        time.sleep(0.2)
        encoder.go.set()
        assert all(future.result()[0, 0] == 5 for future in both)
    assert encoder.batches == [1]


def test_work_that_nobody_waits_for_any_more_is_given_up_and_the_service_goes_on(
    service: EncodeService, encoder: FakeEncoder
) -> None:
    encoder.go.clear()
    with pytest.raises(Unwanted):
        service.encode(KEY, made(1), lambda: False)
    encoder.go.set()
    assert service.encode("other", made(2))[0, 0] == 2


def test_a_failing_encoder_fails_its_images_and_the_service_goes_on(
    service: EncodeService, encoder: FakeEncoder
) -> None:
    encoder.broken = True
    with pytest.raises(EncodeFailed):
        service.encode(KEY, made(1))
    encoder.broken = False
    assert service.encode(KEY, made(1))[0, 0] == 1


@pytest.mark.redis
def test_a_result_is_in_level_2_before_the_lease_ends(scene: Scene) -> None:
    scene.run(a_job())
    rows = scene.level2.get(KEY, 2)
    assert rows is not None and rows[0, 0] == 3
    state = scene.ledger.look(scene.name, "waiter")
    assert not state.running and state.attempts == 0 and state.verdict is None


@pytest.mark.redis
def test_a_message_that_comes_twice_encodes_once(scene: Scene, encoder: FakeEncoder) -> None:
    scene.run(a_job())
    scene.run(a_job())
    assert encoder.batches == [1]


@pytest.mark.redis
@pytest.mark.parametrize(
    "job", [a_job(sent_at=time.time() - 100), a_job(revision="other"), a_job(dtype="float16")]
)
def test_late_messages_and_those_for_another_encoder_are_left_alone(
    scene: Scene, encoder: FakeEncoder, job: EncodeJob
) -> None:
    scene.run(job)
    assert encoder.batches == [] and scene.ledger.look(scene.name, "waiter").attempts == 0


@pytest.mark.redis
def test_an_encode_under_way_may_take_longer_than_its_message_may_wait(
    scene: Scene, encoder: FakeEncoder
) -> None:
    encoder.go.clear()
    job = a_job(deadline_s=0.5, sent_at=time.time())
    with ThreadPoolExecutor(1) as tasks:
        run = tasks.submit(scene.run, job)
        assert encoder.started.wait(30)
        time.sleep(1.0)
        assert not run.done() and scene.ledger.look(scene.name, "waiter").running
        encoder.go.set()
        run.result()
    assert scene.level2.has(KEY)


@pytest.mark.redis
def test_an_encode_whose_waiters_left_is_given_up_and_costs_no_attempt(
    scene: Scene, encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cluster.single_flight.HEARTBEAT_S", 0.02)
    encoder.go.clear()
    with ThreadPoolExecutor(1) as tasks:
        run = tasks.submit(scene.run, a_job())
        assert encoder.started.wait(30)
        scene.ledger.leave(scene.name, "waiter")
        run.result(60)  # while the encoder is still at it
    state = scene.ledger.look(scene.name, "waiter")
    assert not state.running and state.attempts == 0 and state.verdict is None


def test_an_encoder_that_hangs_is_told(encoder: FakeEncoder) -> None:
    crashed = threading.Event()
    encoder.go.clear()
    service = EncodeService(
        lambda _: TileBatcher(encoder.encode, VisualCache(1 << 20), num_rows=two_rows),
        on_crash=crashed.set,
        stall_s=1.0,
    )
    service.start()
    with ThreadPoolExecutor(1) as tasks:
        tasks.submit(service.encode, KEY, made(1))
        assert crashed.wait(60)
        encoder.go.set()
        service.close()


@pytest.mark.redis
def test_what_nobody_wants_is_not_encoded(scene: Scene, encoder: FakeEncoder) -> None:
    scene.ledger.leave(scene.name, "waiter")
    scene.run(a_job())
    assert encoder.batches == []


@pytest.mark.redis
def test_missing_tiles_cost_no_attempt_and_damaged_ones_do(scene: Scene) -> None:
    scene.blobs.put("damaged", b"no tiles", 60)
    scene.run(a_job(tiles_blob="gone"))
    assert scene.ledger.look(scene.name, "waiter").attempts == 0
    scene.run(a_job(tiles_blob="damaged"))
    assert scene.ledger.look(scene.name, "waiter").attempts == 1


@pytest.mark.redis
def test_tiles_of_another_grid_are_a_miss_and_so_is_what_the_worker_keeps_of_them(scene: Scene) -> None:
    scene.run(a_job(), num_rows=4)
    assert scene.level2.get(KEY) is None and not scene.blobs.exists("tiles")
    assert scene.ledger.look(scene.name, "waiter").attempts == 1
    two = Tiles(np.full((2, 8, 8, 3), 7, np.uint8), TileGrid(2, 1, False, 8, 8))
    scene.blobs.put("tiles", to_bytes(two), 60)
    scene.run(a_job(), num_rows=4)
    rows = scene.level2.get(KEY, 4)
    assert rows is not None and rows[0, 0] == 7


@pytest.mark.redis
def test_an_encoder_that_fails_is_a_verdict(scene: Scene, encoder: FakeEncoder) -> None:
    encoder.broken = True
    scene.run(a_job())
    verdict = scene.ledger.look(scene.name, "waiter").verdict
    assert verdict is not None and verdict[0] == "encode_failed"


@pytest.mark.redis
def test_a_full_level_2_is_told_and_soon_forgotten(scene: Scene) -> None:
    scene.level2 = VisualStore(MemoryBlobStore(cap_bytes=10), FORM)
    scene.run(a_job())
    verdict = scene.ledger.look(scene.name, "waiter").verdict
    assert verdict is not None and verdict[0] == "preprocessing_overloaded"
