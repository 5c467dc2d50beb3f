"""The batch runner alone: clocks, kills and disks under the test's control."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from waiting import until

from vlm.api.batches.batch_rows import RowFile, RowResult, error_result
from vlm.api.batches.batch_runner import BatchRunner
from vlm.api.batches.batch_store import BatchJob, BatchStore, Status
from vlm.api.guard.auth import Caller
from vlm.api.storage.files import FileStore

CHAT = "/v1/chat/completions"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Rows:
    """`RunRow` that records bodies; `hold` keeps rows under way."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_after = 10**9

    async def __call__(self, caller: Caller, body: dict[str, Any], deadline: float) -> RowResult:
        self.started.append(body["n"])
        if len(self.started) > self.hold_after:
            await asyncio.Event().wait()
        await self.hold.wait()
        if body.get("bad"):
            return error_result(400, "invalid_value", "A fixed text.")
        return RowResult(200, {"n": body["n"]}, "req-1")


class Bench:
    def __init__(self, root: Path, count: int = 20) -> None:
        self.clock = Clock()
        self.store = BatchStore(root, self.clock)
        self.files = FileStore(root, max_file_bytes=1 << 30, max_total_bytes=1 << 30)
        root.mkdir(parents=True, exist_ok=True)
        self.input = root / "in.jsonl"
        rows = [
            {"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": {"n": n, "bad": n % 5 == 4}}
            for n in range(count)
        ]
        self.input.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def create(self, window_s: int = 100) -> BatchJob:
        return self.store.create(
            "",
            "",
            endpoint=CHAT,
            input_file_id="file-1",
            input_path=self.input,
            window="24h",
            window_s=window_s,
            metadata=None,
        )

    def runner(self, rows: Rows, window: int = 4) -> BatchRunner:
        return BatchRunner(self.store, self.files, rows, clock=self.clock, window=window)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(text) for text in self.files.path("", file_id).read_text().splitlines()]


async def final(bench: Bench, batch: BatchJob) -> BatchJob:
    await until(lambda: bench.store.get("", batch.id).is_final)
    return bench.store.get("", batch.id)


async def run_to_the_end(bench: Bench, batch: BatchJob) -> BatchJob:
    """By a runner that is started and closed around it."""
    runner = bench.runner(Rows())
    await runner.start()
    ended = await final(bench, batch)
    await runner.close()
    return ended


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("completed", ["validating", "in_progress", "finalizing", "completed"]),
        ("cancelled", ["validating", "in_progress", "finalizing", "cancelled"]),
        ("expired", ["validating", "in_progress", "finalizing", "expired"]),
        ("failed", ["validating", "failed"]),
    ],
)
def test_every_status_is_seen_in_its_place(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, end: str, expected: list[str]
) -> None:
    bench = Bench(data_dir)
    if end == "failed":
        bench.input.write_text("{")
    made = bench.create()
    seen: list[str] = [made.status]
    save = BatchStore.save

    def note(store: BatchStore, batch: BatchJob) -> None:
        seen.append(batch.status)
        save(store, batch)

    monkeypatch.setattr(BatchStore, "save", note)

    async def run() -> BatchJob:
        rows = Rows()
        if end in ("cancelled", "expired"):
            rows.hold.clear()
        runner = bench.runner(rows)
        await runner.start()
        if end == "cancelled":
            await until(lambda: bool(rows.started))
            assert (await runner.cancel(bench.store.get("", made.id))).status == "cancelling"
        if end == "expired":
            await until(lambda: bool(rows.started))
            bench.clock.now += 101
        batch = await final(bench, made)
        await runner.close()
        return batch

    assert asyncio.run(run()).status == end
    assert seen == expected


def test_every_status_has_its_place() -> None:
    steps = {"validating", "in_progress", "cancelling", "finalizing"}
    assert set(get_args(Status)) == steps | {"completed", "cancelled", "expired", "failed"}


def test_an_expired_batch_says_so_for_every_row_that_was_not_run(data_dir: Path) -> None:
    bench = Bench(data_dir)
    made = bench.create()

    rows = Rows()
    rows.hold_after = 10

    async def run() -> BatchJob:
        runner = bench.runner(rows)
        await runner.start()
        await until(lambda: len(rows.started) >= 14)
        bench.clock.now += 101
        batch = await final(bench, made)
        await runner.close()
        return batch

    batch = asyncio.run(run())
    assert batch.status == "expired" and batch.expired_at == bench.clock.now
    answered = {row["custom_id"] for row in bench.lines(batch.output_file_id)}
    failed = {row["custom_id"]: row["error"]["code"] for row in bench.lines(batch.error_file_id)}
    expired = {custom_id for custom_id, code in failed.items() if code == "batch_expired"}
    run_through = rows.started[:10]
    assert answered == {f"r{n}" for n in run_through if n % 5 != 4}
    assert expired == {f"r{n}" for n in range(20) if n not in run_through}
    assert answered | failed.keys() == {f"r{n}" for n in range(20)} and not answered & failed.keys()
    assert (batch.total, batch.completed, batch.failed) == (20, len(answered), len(failed))


def test_a_batch_that_expired_while_no_server_ran_ends_at_the_next_start(data_dir: Path) -> None:
    bench = Bench(data_dir)
    made = bench.create()
    bench.clock.now += 1000

    batch = asyncio.run(run_to_the_end(bench, made))
    assert batch.status == "expired" and batch.completed + batch.failed == 20


@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_1", "custom', b"\0\0\0\0"])
def test_a_killed_runner_leaves_rows_that_the_next_one_keeps(data_dir: Path, torn: bytes) -> None:
    bench = Bench(data_dir)
    made = bench.create()
    first, second = Rows(), Rows()
    first.hold_after = 9

    async def run_and_kill() -> None:
        runner = bench.runner(first)
        await runner.start()
        await until(lambda: len(first.started) >= 13)
        await runner.close()
        await runner.close()

    asyncio.run(run_and_kill())
    with (bench.store.folder(made) / "output.jsonl").open("ab") as out:
        out.write(torn)

    async def go_on() -> BatchJob:
        runner = bench.runner(second)
        await runner.start()
        batch = await final(bench, made)
        await runner.close()
        return batch

    batch = asyncio.run(go_on())
    assert batch.status == "completed" and (batch.completed, batch.failed) == (16, 4)
    rows = bench.lines(batch.output_file_id) + bench.lines(batch.error_file_id)
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{n}" for n in range(20))
    assert not set(second.started) & set(first.started[:9])
    assert len(second.started) == 11


def test_a_cancel_that_was_asked_for_before_a_restart_still_ends(data_dir: Path) -> None:
    bench = Bench(data_dir)
    made = bench.create()
    bench.store.ask_to_cancel(made)
    rows = Rows()

    async def run() -> tuple[BatchJob, BatchJob]:
        runner = bench.runner(rows)
        before = await runner.current(made)
        await runner.start()
        batch = await final(bench, made)
        await runner.close()
        return before, batch

    before, batch = asyncio.run(run())
    assert before.status == "cancelling" and batch.status == "cancelled"


def test_one_process_runs_the_batches_and_another_takes_over(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm.api.batches.batch_runner.LOCK_RETRY_S", 0.01)
    bench = Bench(data_dir)
    made = bench.create()
    first, second = Rows(), Rows()
    first.hold_after = 5

    async def run() -> BatchJob:
        one, other = bench.runner(first), bench.runner(second)
        await one.start()
        await until(lambda: len(first.started) >= 9)
        await other.start()
        await asyncio.sleep(0.05)
        assert not second.started and not await other.take_lock()
        await one.close()
        batch = await final(bench, made)
        await other.close()
        return batch

    assert asyncio.run(run()).completed == 16


def test_a_full_disk_is_waited_out(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm.api.batches.batch_runner.FAULT_RETRY_S", 0.02)
    bench = Bench(data_dir)
    made = bench.create()
    append = RowFile.append
    failures = iter(range(3))

    async def failing(self: RowFile, lines: bytes, custom_ids: Iterable[str]) -> None:
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        await append(self, lines, custom_ids)

    monkeypatch.setattr(RowFile, "append", failing)

    batch = asyncio.run(run_to_the_end(bench, made))
    assert batch.status == "completed" and (batch.completed, batch.failed) == (16, 4)


def test_the_window_is_shared_by_all_batches_and_none_starves(data_dir: Path) -> None:
    bench = Bench(data_dir, count=40)
    rows = Rows()
    rows.hold.clear()

    async def run() -> None:
        runner = bench.runner(rows, window=6)
        batches = [bench.create() for _ in range(3)]
        await runner.start()
        await until(lambda: len(rows.started) == 6)
        await asyncio.sleep(0.03)
        assert len(rows.started) == 6
        rows.hold.set()
        for batch in batches:
            assert (await final(bench, batch)).status == "completed"
        await runner.close()

    asyncio.run(run())
    assert sorted(rows.started) == sorted(list(range(40)) * 3)
    middle = rows.started[30:90]
    assert max(middle.count(n) for n in set(middle)) >= 2  # batches take turns


def test_a_crash_between_publishing_and_its_state_publishes_again(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(data_dir)
    made = bench.create()
    save = bench.store.save

    class Killed(BaseException):
        pass

    def dying(self: BatchStore, batch: BatchJob) -> None:
        if batch.status == "completed":
            raise Killed
        save(batch)

    monkeypatch.setattr(BatchStore, "save", dying)

    async def crash() -> None:
        runner = bench.runner(Rows())
        await runner.start()
        await until(lambda: bench.store.get("", made.id).status == "finalizing")
        await asyncio.sleep(0.1)
        await runner.close()

    asyncio.run(crash())
    monkeypatch.undo()
    rows = Rows()

    async def go_on() -> BatchJob:
        runner = bench.runner(rows)
        await runner.start()
        batch = await final(bench, made)
        await runner.close()
        return batch

    batch = asyncio.run(go_on())
    assert batch.status == "completed" and not rows.started
    assert len(bench.lines(batch.output_file_id)) == 16 and len(bench.lines(batch.error_file_id)) == 4
