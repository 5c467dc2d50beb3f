"""What was said to be stored is found again after a power cut: names are synced as well as contents."""

from __future__ import annotations

import asyncio
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlm.api.batches.batch_store import BatchJob, BatchStore
from vlm.api.storage.files import FileStore
from vlm.caption.journal import Journal
from vlm.caption.rows import PageRef, RowContext, error_row
from vlm.caption.views.formats import write_view
from vlm.requests.durable import make_folder, sync_folder


class Disk:
    """Names that a power cut would lose: made or moved in a folder that was not synced since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loose: set[Path] = set()
        fsync, rename, mkdir = os.fsync, os.rename, os.mkdir

        def synced(fd: int) -> None:
            fsync(fd)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                folder = Path(os.readlink(f"/proc/self/fd/{fd}"))
                self.loose = {path for path in self.loose if path.parent != folder}

        def noting(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                done = function(*args, **kwargs)
                self.note(Path(args[argument]))
                return done

            return call

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "mkdir", noting(mkdir, 0))
        monkeypatch.setattr(os, "rename", noting(rename, 1))
        monkeypatch.setattr(os, "replace", noting(os.replace, 1))

    def note(self, path: Path) -> None:
        self.loose.add(path.absolute())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch)


def test_a_folders_names_are_synced_by_the_folder(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    assert disk.loose == {tmp_path / "made"}
    sync_folder(tmp_path)
    assert not disk.loose
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir() and not disk.loose


def files_in(folder: Path) -> FileStore:
    return FileStore(folder, max_file_bytes=1000, max_total_bytes=1000)


def test_a_stored_file_keeps_its_name(disk: Disk, tmp_path: Path) -> None:
    store = files_in(tmp_path)
    store.add("one", "a.jsonl", "batch", io.BytesIO(b"{}"))
    assert not disk.loose
    finished = tmp_path / "output"
    finished.write_bytes(b"{}")
    stored = store.adopt("two", "b.jsonl", "batch_output", finished)
    assert not disk.loose and store.get("two", stored.id).bytes == 2


def test_a_batch_and_what_it_was_told_keep_their_names(disk: Disk, tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    rows = tmp_path / "rows"
    rows.write_bytes(b"{}")
    batch: BatchJob = store.create(
        "one",
        "caller",
        endpoint="/v1/chat/completions",
        input_file_id="file",
        input_path=rows,
        window="24h",
        window_s=60,
        metadata=None,
    )
    assert not disk.loose
    store.save(batch)
    assert not disk.loose
    disk.note(store.folder(batch) / "cancel")
    store.ask_to_cancel(batch)
    assert not disk.loose and store.cancel_asked(batch)


def test_a_journal_keeps_its_name_and_its_compacted_successor_too(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    disk.note(path)
    journal = Journal(path)
    assert not disk.loose
    row = error_row(PageRef("x.png", 1, 1, "c" * 64), RowContext("q", "p", "m", "r"), "code", "A fixed text.")
    asyncio.run(journal.append(row))
    asyncio.run(journal.append(row))
    assert journal.compact() and not disk.loose
    write_view(tmp_path / "out.csv", "csv", journal.rows())
    assert not disk.loose
    journal.close()
