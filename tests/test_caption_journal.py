"""The journal: what is durable, what a kill may leave behind, who may write."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Timings, Usage
from vlm.caption.journal import Journal, NotAnOutput, OutputBusy
from vlm.caption.rows import PageRef, Row, RowContext, duplicate_row, error_row, page_row

CONTEXT = RowContext("q" * 32, "caption", "fake", "r" * 32)


def row_for(
    number: int, *, content: str = "a", text: str = "text", page_count: int = 1, page: int = 1
) -> Row:
    ref = PageRef(f"dir/{number}.png", page, page_count, content * 64)
    return page_row(ref, CONTEXT, f"{content}{number}", text, "stop", Usage(9, 4, 0, 3), Timings())


def state(journal: Journal, row: Row) -> str | None:
    ref = PageRef(row["path"], row["page"], 0, row["file_sha256"])
    return journal.settled(ref.slot(row["question"]), row["id"])


def write(path: Path, rows: list[Row]) -> None:
    journal = Journal(path)

    async def append() -> None:
        await asyncio.gather(*(journal.append(row) for row in rows))

    asyncio.run(append())
    journal.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "out.jsonl")
    yield opened
    opened.close()


def test_a_row_is_on_disk_when_append_returns(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recording(fd: int) -> None:
        fsync(fd)
        synced.append(journal.path.stat().st_size)

    monkeypatch.setattr(os, "fsync", recording)

    async def append() -> None:
        for number in range(5):
            await journal.append(row_for(number))
            assert synced[-1] == journal.path.stat().st_size
            assert json.loads(journal.path.read_text().splitlines()[-1]) == row_for(number)

    asyncio.run(append())


def test_rows_that_come_together_share_a_sync(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)

    async def append() -> None:
        await asyncio.gather(*(journal.append(row_for(number)) for number in range(100)))

    asyncio.run(append())
    assert len(journal.path.read_text().splitlines()) == 100
    assert len(syncs) <= 2


@given(cut=st.integers(min_value=0, max_value=3000), zeros=st.integers(min_value=0, max_value=40))
@settings(deadline=None, max_examples=60)
def test_a_torn_end_loses_only_the_torn_row(
    tmp_path_factory: pytest.TempPathFactory, cut: int, zeros: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "out.jsonl"
    rows = [row_for(number, text="täxt\n" * number) for number in range(4)]
    write(path, rows)
    whole = path.read_bytes()
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut] + bytes(zeros))
    # A row whose text is complete but for its line feed is as good as written.
    ends = [i for i in range(len(whole)) if whole[i : i + 1] == b"\n"]
    complete = sum(end < cut or (end == cut and zeros == 0) for end in ends)
    journal = Journal(path)
    assert journal.num_loaded == complete
    assert [state(journal, row) for row in rows] == ["text"] * complete + [None] * (4 - complete)
    asyncio.run(journal.append(row_for(9)))
    journal.close()
    assert [json.loads(line)["path"] for line in path.read_text().splitlines()] == [
        row["path"] for row in [*rows[:complete], row_for(9)]
    ]


def test_two_runs_can_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = Journal(path)
    with pytest.raises(OutputBusy):
        Journal(path)
    code = (
        "import sys, pathlib; from vlm.caption.journal import Journal, OutputBusy\n"
        "try: Journal(pathlib.Path(sys.argv[1]))\n"
        "except OutputBusy: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == 7
    first.close()
    Journal(path).close()


def test_the_lock_moves_with_the_compacted_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [row_for(1), row_for(1, content="b", text="new")])
    first = Journal(path)
    old_inode = path.stat().st_ino
    assert first.compact()
    assert path.stat().st_ino != old_inode
    with pytest.raises(OutputBusy):
        Journal(path)
    asyncio.run(first.append(row_for(2)))
    first.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["new", "text"]


@pytest.mark.parametrize("content", [b"my notes\n", b'{"other": 1}\n', b"\x89PNG", b"{ no json", b"[]\n"])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(NotAnOutput):
        Journal(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null"])
def test_a_device_is_no_output(path: str) -> None:
    with pytest.raises(NotAnOutput):
        Journal(Path(path))


def test_changed_content_replaces_the_old_row_in_the_view_and_after_compaction(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    old, new = row_for(1), row_for(1, content="b", text="new")
    write(path, [old, row_for(2), new])
    journal = Journal(path)
    assert state(journal, old) is None and state(journal, new) == "text"
    assert sorted(row["text"] for row in journal.rows()) == ["new", "text"]
    assert len(path.read_text().splitlines()) == 3  # nothing is rewritten while a run may append
    assert journal.compact() and not journal.compact()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [row_for(2)["id"], new["id"]]
    journal.close()


def test_a_compaction_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [row_for(1), row_for(1, content="b")])
    path.chmod(0o600)
    before = path.read_bytes()
    journal = Journal(path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.compact()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert journal.compact() and path.stat().st_mode & 0o777 == 0o600
    journal.close()


def test_pages_that_a_shorter_document_lost_leave_the_view(journal: Journal) -> None:
    async def run() -> None:
        for page in (1, 2, 3):
            await journal.append(row_for(1, page=page, page_count=3))
        await journal.append(row_for(1, content="b", page=1, page_count=2))
        await journal.append(row_for(1, content="b", page=2, page_count=2))

    asyncio.run(run())
    journal.saw_document("dir/1.png", CONTEXT.question, "b" * 64, 1)
    assert [(row["page"], row["file_sha256"][0]) for row in journal.rows()] == [(1, "b"), (2, "b")]
    assert journal.compact()
    assert journal.num_loaded == 2


def test_another_question_keeps_its_rows_beside(journal: Journal) -> None:
    other = dict(row_for(1), question="o" * 32, id="other")

    async def run() -> None:
        await journal.append(other)
        await journal.append(row_for(1, content="b"))

    asyncio.run(run())
    journal.saw_document("dir/1.png", CONTEXT.question, "b" * 64, 1)
    assert len(list(journal.rows())) == 2
    assert not journal.compact()


def test_rows_come_in_the_order_of_the_inputs(journal: Journal) -> None:
    async def run() -> None:
        for number in (3, 1, 2):
            await journal.append(row_for(number))

    asyncio.run(run())
    for position, number in enumerate((1, 2, 3)):
        journal.saw_document(f"dir/{number}.png", CONTEXT.question, "a" * 64, position)
    assert [row["path"] for row in journal.rows()] == ["dir/1.png", "dir/2.png", "dir/3.png"]


def test_work_is_found_by_content_and_never_from_an_error(journal: Journal) -> None:
    from vlm.caption.rows import work_of

    ref = PageRef("x.png", 1, 1, "c" * 64)
    copy = duplicate_row(PageRef("y.png", 1, 1, "a" * 64), CONTEXT, "a1", row_for(1))

    async def run() -> None:
        await journal.append(row_for(1))
        await journal.append(copy)
        await journal.append(error_row(ref, CONTEXT, "invalid_image", "The image is damaged."))

    asyncio.run(run())
    found = journal.find_work(work_of("a1", CONTEXT.question, CONTEXT.model_revision))
    assert found is not None and found["id"] == row_for(1)["id"]
    assert copy["duplicate_of"] == row_for(1)["id"] and copy["text"] == "text"
    assert journal.find_work(work_of("", CONTEXT.question, CONTEXT.model_revision)) is None
    assert journal.find_work(work_of("a1", "o" * 32, CONTEXT.model_revision)) is None


@pytest.mark.parametrize(("code", "settled"), [("invalid_image", "error"), ("engine_died", None)])
def test_only_errors_of_the_page_itself_are_final(journal: Journal, code: str, settled: Any) -> None:
    row = error_row(PageRef("x.png", 1, 1, "c" * 64), CONTEXT, code, "A fixed text.")
    asyncio.run(journal.append(row))
    assert state(journal, row) == settled


def test_a_full_disk_leaves_no_half_row(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(journal.append(row_for(1)))
    size = journal.path.stat().st_size
    real = os.pwrite

    def short_then_full(fd: int, data: bytes, offset: int) -> int:
        if offset > size:
            raise OSError(28, "No space left on device")
        return real(fd, data[:10], offset)

    monkeypatch.setattr(os, "pwrite", short_then_full)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(journal.append(row_for(2)))
    assert journal.path.stat().st_size == size
    monkeypatch.undo()
    asyncio.run(journal.append(row_for(3)))
    assert [json.loads(line)["path"] for line in journal.path.read_text().splitlines()] == [
        "dir/1.png",
        "dir/3.png",
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.booleans()), max_size=30))
@settings(deadline=None, max_examples=20)
def test_the_view_after_any_history_is_the_last_row_of_each_slot(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, str, bool]]
) -> None:
    """Written, closed and reopened, compacted at random: always equal to a dict of slots."""
    path = tmp_path_factory.mktemp("history") / "out.jsonl"
    expected: dict[str, str] = {}
    journal = Journal(path)
    for number, content, reopen in history:
        row = row_for(number, content=content)
        asyncio.run(journal.append(row))
        expected.pop(row["path"], None)
        expected[row["path"]] = row["id"]
        if reopen:
            journal.compact()
            journal.close()
            journal = Journal(path)
    assert {row["path"]: row["id"] for row in journal.rows()} == expected
    journal.compact()
    journal.close()
    assert len(path.read_text().splitlines()) == len(expected)
