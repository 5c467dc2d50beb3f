"""Files that are no ordinary ones, or do not stay as they are while a run reads them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import png, rows_of, run, tiff

from preprocess.limits import ImageLimits
from preprocess.pages import PageLimits
from vlm.caption import input_documents
from vlm.caption.input_documents import DocumentReader
from workers.local.page_drawing import PageRenderer


class Endless:
    """A regular file whose reading never ends: /proc/kmsg, a log that grows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_read = 0

    def read(self, count: int = -1) -> bytes:
        assert count >= 0, "read to the end"
        self.num_read += count
        assert self.num_read <= 1 << 20
        return bytes(count)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_of_a_file_that_does_not_end_as_much_is_read_as_it_had(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    @contextlib.contextmanager
    def reading(path: str) -> Iterator[Endless]:
        yield Endless(size)

    monkeypatch.setattr(input_documents, "_reading", reading)
    stopped = threading.Event()
    assert input_documents._sha256("endless", size, stopped) == hashlib.sha256(bytes(size)).hexdigest()
    with pytest.raises(input_documents.UnreadableFile, match="changed"):
        input_documents._image("endless", "the hash of what it had", 500)


def test_hashing_ends_with_whoever_waited_for_it(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for its threads as it ends."""
    path = Path("in/large.png")
    path.write_bytes(b"")
    os.truncate(path, 256 << 20)
    monkeypatch.setattr(input_documents, "_CHUNK", 1)
    reader = DocumentReader(PageRenderer(), ImageLimits(), PageLimits())

    async def run_it() -> None:
        task = asyncio.create_task(reader.identify(str(path)))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run_it())  # returns when the thread has


def test_a_huge_file_is_refused_unread_and_looked_at_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("in/huge.png")
    path.write_bytes(b"")
    os.truncate(path, 1 << 42)  # without a block on the disk

    def never(*arguments: Any) -> str:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(input_documents, "_sha256", never)
        run(out)
    (row,) = rows_of(out)
    assert row["error"]["code"] == "file_too_large" and row["page"] == 0
    path.write_bytes(png(1))
    run(out)
    (row,) = rows_of(out)
    assert "text" in row


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder link"])
def test_what_is_no_regular_file_is_an_error_row_at_once(out: Path, kind: str) -> None:
    """Opening a pipe would wait for somebody who writes into it."""
    Path("in/a.png").write_bytes(png(1))
    odd = Path("in/odd.png")
    match kind:
        case "pipe":
            os.mkfifo(odd)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(odd))
        case "device":
            os.symlink("/dev/zero", odd)
        case _:
            os.symlink("odd.png", odd)
    assert run(out).errors == 1
    rows = {row["path"]: row for row in rows_of(out)}
    assert rows["in/odd.png"]["error"]["code"] == "unreadable_file" and "text" in rows["in/a.png"]
    odd.unlink()
    odd.write_bytes(png(2))
    assert run(out).errors == 0


@pytest.mark.parametrize("function", ["page_offsets", "page_file"])
def test_a_file_that_shrinks_while_it_is_read_ends_no_run(
    out: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Where a mapped file does, the system ends the process."""
    Path("in/a.png").write_bytes(png(1))
    path = Path("in/b.tif")
    path.write_bytes(tiff([2, 3]))
    real = getattr(input_documents, function)

    def shrinking(data: Any, *arguments: Any) -> Any:
        os.truncate(path, 8)
        return real(data, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(input_documents, function, shrinking)
        run(out)
    rows = {row["path"]: row for row in rows_of(out)}
    assert "text" in rows["in/a.png"]
    assert rows["in/b.tif"]["error"] == {
        "code": "unreadable_file",
        "message": "The file can't be read: it changed while it was read.",
    }
    path.write_bytes(tiff([2, 3]))
    assert run(out).errors == 0
    assert sorted((row["path"], row["page"]) for row in rows_of(out)) == [
        ("in/a.png", 1),
        ("in/b.tif", 1),
        ("in/b.tif", 2),
    ]


def test_an_answer_is_never_told_of_other_bytes_than_it_is_of(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written again between its hash and its turn is done by a later run."""
    path = Path("in/a.png")
    path.write_bytes(png(1))
    real = input_documents._image

    def changing(*arguments: Any) -> Any:
        path.write_bytes(png(2))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(input_documents, "_image", changing)
        run(out)
    (row,) = rows_of(out)
    assert row["error"]["message"] == "The file can't be read: it changed while it was read."
    run(out)
    (row,) = rows_of(out)
    assert row["file_sha256"] == row["image_sha256"] == hashlib.sha256(png(2)).hexdigest() and "text" in row
