"""Turns of batches: by key, then by batch, whatever their lengths; and checks that keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from vlm.api.batches import batch_check
from vlm.api.batches.batch_check import all_places, check, read_places, validate
from vlm.api.batches.batch_rows import RowBook, RowResult, encode_row, read_row
from vlm.api.batches.batch_runner import SPARE, BatchRunner
from vlm.api.batches.batch_store import BatchJob, BatchStore
from vlm.api.batches.row_turns import RowTurns
from vlm.api.guard.auth import Caller
from vlm.api.storage.files import FileStore
from workers.children.child import Child

CHAT = "/v1/chat/completions"
PER_KEY, PLACES = 3, 5


@dataclass
class Waiter:
    key: str
    batch: str
    task: asyncio.Task[None]

    @property
    def is_running(self) -> bool:
        return self.task.done() and not self.task.cancelled()


@dataclass
class Room:
    """Waiters on `RowTurns`, and what has to hold among them."""

    turns: RowTurns = field(default_factory=lambda: RowTurns(PER_KEY, PLACES - PER_KEY))
    waiters: list[Waiter] = field(default_factory=list)

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.waiters = [w for w in self.waiters if not w.task.cancelled()]
        running = Counter(w.key for w in self.waiters if w.is_running)
        assert running == self.turns.running
        assert running.total() <= PLACES and max(running.values(), default=0) <= PER_KEY
        free = PLACES - running.total()
        able = [w for w in self.waiters if not w.is_running and running[w.key] < PER_KEY]
        assert not (free and able), "a place is free, and one who may have it waits"

    async def come(self, key: str, batch: str) -> Waiter:
        waiter = Waiter(key, batch, asyncio.create_task(self.turns.acquire(key, batch)))
        self.waiters.append(waiter)
        await self.settle()
        return waiter

    async def go(self, waiter: Waiter) -> list[Waiter]:
        """Those who run now and did not before."""
        waiting = [w for w in self.waiters if not w.is_running]
        self.waiters.remove(waiter)
        if waiter.is_running:
            self.turns.release(waiter.key, waiter.batch)
        else:
            waiter.task.cancel()
        await self.settle()
        return [w for w in waiting if w.is_running]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whoever_has_the_least_under_way_is_next(data: st.DataObject) -> None:
    """Of keys first, then of the key's batches; nobody is passed over, nothing is kept of who is gone."""

    async def run() -> None:
        room = Room()
        for _ in range(data.draw(st.integers(1, 30))):
            if not room.waiters or data.draw(st.booleans()):
                await room.come(data.draw(st.sampled_from("ABC")), data.draw(st.sampled_from("12")))
                continue
            leaving = data.draw(st.sampled_from(room.waiters))
            running = [w for w in room.waiters if w.is_running and w is not leaving]
            keys, batches = Counter(w.key for w in running), Counter((w.key, w.batch) for w in running)
            waiting = [w for w in room.waiters if not w.is_running and w is not leaving]
            for begun in await room.go(leaving):
                able = [w for w in waiting if keys[w.key] < PER_KEY]
                assert keys[begun.key] == min(keys[w.key] for w in able)
                own = [batches[w.key, w.batch] for w in able if w.key == begun.key]
                assert batches[begun.key, begun.batch] == min(own)
        for waiter in list(room.waiters):
            await room.go(waiter)
        assert not room.turns._keys and not room.turns._waiting and room.turns._free == PLACES

    asyncio.run(run())


def test_who_has_fewer_under_way_goes_before_who_has_waited_longer() -> None:
    async def run() -> None:
        room = Room()
        running = [await room.come(key, "1") for key in "CCBBA"]
        for key in "ACB":
            await room.come(key, "1")
        assert [w.key for w in await room.go(running[2])] == ["B"]  # C has waited longest, and has two

    asyncio.run(run())


@pytest.mark.parametrize("keys", ["BC", "BB"])
def test_a_turn_is_not_given_to_who_is_leaving(keys: str) -> None:
    async def run() -> None:
        turns = RowTurns(1)
        await turns.acquire("A", "1")
        leaving, staying = (asyncio.create_task(turns.acquire(key, "1")) for key in keys)
        await asyncio.sleep(0)
        leaving.cancel()
        turns.release("A", "1")  # before the one that is cancelled has run
        await asyncio.gather(leaving, staying, return_exceptions=True)
        assert leaving.cancelled() and not staying.cancelled() and turns.running == {keys[1]: 1}

    asyncio.run(run())


def test_batches_of_a_key_have_turns_one_after_another() -> None:
    """Whatever is under way, those who waited longest among equals are next."""

    async def run() -> list[str]:
        turns, order = RowTurns(1), []

        async def row(batch: str) -> None:
            async with turns.turn("key", batch):
                order.append(batch)
                await asyncio.sleep(0)

        await asyncio.gather(*(row(batch) for batch in "AAAAAABBBC"))
        return order

    assert asyncio.run(run()) == list("ABCABABAAA")


class Runs:
    """`RunRow` that never ends a row until it is told to."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.let_end = asyncio.Semaphore(0)

    async def __call__(self, caller: Caller, body: dict[str, Any], deadline: float) -> RowResult:
        self.started.append((caller.name, body["batch"]))
        await self.let_end.acquire()
        return RowResult(200, {}, "req-1")


class Desk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = BatchStore(root)
        self.files = FileStore(root, max_file_bytes=1 << 30, max_total_bytes=1 << 30)
        root.mkdir()

    def batch(self, key: str, name: str, num_rows: int) -> BatchJob:
        path = self.root / f"{name}.jsonl"
        with path.open("w") as out:
            for number in range(num_rows):
                row = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"batch": name}}
                out.write(json.dumps(row) + "\n")
        about = {
            "endpoint": CHAT,
            "input_file_id": "file-1",
            "window": "24h",
            "window_s": 9999,
            "metadata": None,
        }
        return self.store.create("", key, input_path=path, **about)


def test_one_row_of_another_key_starts_beside_long_batches_that_hold_every_place(tmp_path: Path) -> None:
    """Nothing of them has to end for it, and none of their rows starts before it."""
    desk = Desk(tmp_path / "data")

    async def run() -> None:
        runs = Runs()
        runner = BatchRunner(desk.store, desk.files, runs, window=4)
        await runner.start()
        long = [desk.batch("long", f"long-{number}", 300) for number in range(6)]
        for batch in long:
            runner.add(batch)
        await until(lambda: all(desk.store.get("", batch.id).status == "in_progress" for batch in long))
        await until(lambda: len(runs.started) == 4)
        await asyncio.sleep(0.05)
        for _ in range(4):
            runs.let_end.release()
        await until(lambda: len(runs.started) == 8)
        assert len({name for _, name in runs.started[4:]}) == 4  # a row of each, not four of the first
        assert {key for key, _ in runs.started} == {"long"}
        short = desk.batch("short", "short", 1)
        runner.add(short)
        await until(lambda: ("short", "short") in runs.started)
        assert len(runs.started) == 9
        # a batch of the long ones' own key is at most once behind each of them
        own = desk.batch("long", "own", 1)
        runner.add(own)
        for _ in range(6):
            runs.let_end.release()
            await asyncio.sleep(0.05)
        await until(lambda: ("long", "own") in runs.started)
        await runner.close()

    asyncio.run(run())


def test_keys_share_the_places_and_one_alone_has_its_whole_window(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "data")

    async def run() -> None:
        runs = Runs()
        runner = BatchRunner(desk.store, desk.files, runs, window=6)
        await runner.start()
        runner.add(desk.batch("A", "batch-A", 30))
        await until(lambda: len(runs.started) == 6)
        await asyncio.sleep(0.05)
        assert len(runs.started) == 6
        others = [desk.batch(key, f"batch-{key}", 30) for key in "BCDEFGH"]
        for batch in others:
            runner.add(batch)
        await until(lambda: all(desk.store.get("", batch.id).status == "in_progress" for batch in others))
        await until(lambda: len(runs.started) == 6 + SPARE)
        for _ in range(20):
            runs.let_end.release()
        await until(lambda: len(runs.started) == 6 + SPARE + 20)
        shares = runner._turns.running
        assert len(shares) == 8 and max(shares.values()) - min(shares.values()) <= 1
        await runner.close()

    asyncio.run(run())


def test_rows_leave_no_descriptors_open(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "data")

    async def run() -> None:
        runs = Runs()
        runner = BatchRunner(desk.store, desk.files, runs)
        await runner.start()
        made = desk.batch("A", "batch", 40)
        runner.add(made)
        await until(lambda: len(runs.started) == 24)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(39):
            runs.let_end.release()
            await asyncio.sleep(0.002)
        await until(lambda: len(runs.started) == 40)
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # a write, a read, an index at this moment
        await runner.close()

    asyncio.run(run())


@pytest.mark.parametrize("damage", [b"\0" * 9 + b"}\n", b'"a":1\n', b'"a":1}', b"}\n"])
def test_answers_that_a_crash_damaged_are_no_answers(damage: bytes, tmp_path: Path) -> None:
    """Nor are those behind them; the rows run again."""
    path, index = rows_file(tmp_path / "input.jsonl", 9), tmp_path / "index.jsonl"
    assert validate(path, CHAT, index) == (9, [])
    good = [encode_row(f"é{number}", RowResult(200, {"a": 'x"\\'}, "req-1")) for number in range(5)]
    bad = good[2].partition(b'"response"')[0] + damage if damage != b"}\n" else b"}\n"
    (tmp_path / "output.jsonl").write_bytes(b"".join((*good[:2], bad, *good[3:])))
    book = RowBook(tmp_path, 9)
    assert book.output.count == 2
    assert (tmp_path / "output.jsonl").read_bytes() == b"".join(good[:2])

    async def left() -> list[int]:
        return [place.number async for places in book.left() for place in places]

    assert asyncio.run(left()) == list(range(2, 9))


# Checks


def rows_file(path: Path, num_rows: int, filler: str = "") -> Path:
    with path.open("w") as out:
        for number in range(num_rows):
            body = {"n": number, "filler": filler}
            row = {"custom_id": f"é{number}", "method": "POST", "url": CHAT, "body": body}
            out.write("\n" * (number % 3) + json.dumps(row, ensure_ascii=number % 2 == 0) + "\n")
    return path


@pytest.mark.parametrize("in_a_process", [False, True])
def test_a_check_finds_every_row_in_whatever_process(
    in_a_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_check, "LARGE_BYTES", 0 if in_a_process else 1 << 40)
    if in_a_process:
        monkeypatch.delattr(batch_check, "validate")  # nothing of it here
    path, index = rows_file(tmp_path / "in.jsonl", 2500), tmp_path / "index.jsonl"
    assert asyncio.run(check(path, CHAT, index)) == (2500, [])
    places = list(all_places(index))
    assert [place.number for place in places] == list(range(2500))
    for place in places[::97]:
        row = read_row(path, place, CHAT)
        assert row.custom_id == place.custom_id and row.body["n"] == place.number
    paged, start = [], 0
    while True:
        found, start = read_places(index, start, len(paged), 7)
        if not found:
            break
        paged += found
    assert paged == places


def test_a_large_file_with_faults_is_told_as_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = rows_file(tmp_path / "in.jsonl", 5), tmp_path / "index.jsonl"
    path.write_bytes(path.read_bytes() + b"{\n" + path.read_bytes())
    here = validate(path, CHAT, index)
    assert [error.code for error in here[1]] == ["invalid_json_line"] + 5 * ["duplicate_custom_id"]
    monkeypatch.setattr(batch_check, "LARGE_BYTES", 0)
    assert asyncio.run(check(path, CHAT, index)) == here and not index.exists()
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(check(rows_file(tmp_path / "good.jsonl", 5), CHAT, tmp_path / "absent" / "index.jsonl"))
    monkeypatch.setattr(batch_check, "MAX_ROWS", 3)
    assert [error.code for error in asyncio.run(check(path, CHAT, index))[1]] == ["too_many_lines"]


def test_a_check_that_dies_is_begun_again_and_a_check_that_is_called_off_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_check, "LARGE_BYTES", 0)
    path, index = rows_file(tmp_path / "in.jsonl", 20), tmp_path / "index.jsonl"
    begun: list[Child] = []

    def dying(command: list[str]) -> Child:
        begun.append(Child(command))
        if len(begun) < 3:
            os.kill(begun[-1].pid, signal.SIGKILL)
        return begun[-1]

    monkeypatch.setattr(batch_check, "Child", dying)
    assert asyncio.run(check(path, CHAT, index)) == (20, []) and len(begun) == 3
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # which nobody ever writes to

    async def call_off() -> None:
        task = asyncio.create_task(check(pipe, CHAT, index))
        await until(lambda: len(begun) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert begun[-1].exit_status == -signal.SIGKILL

    asyncio.run(call_off())


def test_a_batch_that_an_earlier_version_began_gets_its_index(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "data")
    made = desk.batch("", "old", 7)
    folder = desk.store.folder(made)

    async def run() -> None:
        runs = Runs()
        for _ in range(7):
            runs.let_end.release()
        runner = BatchRunner(desk.store, desk.files, runs)
        await runner.start()
        await until(lambda: len(runs.started) == 7)
        await until(lambda: desk.store.get("", made.id).is_final)
        await until(lambda: not (folder / "index.jsonl").exists())
        await runner.close()

    desk.store.save(replace(made, status="in_progress", total=7, in_progress_at=5))
    assert not (folder / "index.jsonl").exists()
    asyncio.run(run())
    ended = desk.store.get("", made.id)
    assert (ended.status, ended.completed, ended.in_progress_at) == ("completed", 7, 5)
