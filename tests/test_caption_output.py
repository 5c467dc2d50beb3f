"""Where rows go: files that are continued, stdout, and files that are left alone."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import FakeEngine, fake_pipeline, png, rows_of

from vlm.caption.caption_job import CaptionJob, run_job
from vlm.caption.journal import NotAnOutput
from vlm.caption.output import opened_output
from vlm.caption.page_answers import Start
from vlm.caption.presets import make_question
from vlm.cli.errors import CommandError
from workers.contract.engine_client import EngineUnavailable

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for number in range(6):
        Path(f"in/{number}.png").write_bytes(png(number))
    return tmp_path


def go(output: str, *inputs: str, engine: FakeEngine | None = None, **more: Any) -> dict[str, Any]:
    job = CaptionJob(inputs or ("in",), Path(output), make_question(preset="caption"), quiet=True, **more)
    return run_job(job, lambda: fake_pipeline(engine or FakeEngine()))


class NeverStarted(FakeEngine):
    async def start(self) -> None:
        raise AssertionError("the engine was started")


def child(folder: Path, output: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TESTS / "caption_child.py"), "fake", output, str(folder / "log"), "in"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_json_lines_go_to_stdout_and_nothing_stays(
    folder: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert go("-")["pages"] == 6
    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert sorted(row["path"] for row in rows) == [f"in/{number}.png" for number in range(6)]
    assert sorted(os.listdir()) == ["in"]


@pytest.mark.parametrize("form", ["csv", "md"])
def test_other_formats_go_to_stdout_in_the_inputs_order(
    folder: Path, capsysbinary: pytest.CaptureFixture[bytes], form: Any
) -> None:
    go(f"out.{form}")
    assert go("-", form=form, as_json=True)["output"] == "-"
    text = capsysbinary.readouterr().out.decode()
    document, _, summary = text.rstrip("\n").rpartition("\n")
    assert json.loads(summary)["pages"] == 6, "--json: the last line"
    if form == "md":
        assert document + "\n" == Path("out.md").read_text()
    else:
        found = csv.DictReader(io.StringIO(document + "\n", newline=""))
        assert [row["path"] for row in found] == [f"in/{number}.png" for number in range(6)]


def test_a_row_is_on_stdout_before_the_next_page_is_done(folder: Path) -> None:
    with child(folder, "-") as running:
        assert running.stdout is not None
        first = json.loads(running.stdout.readline())
        assert first["path"].startswith("in/")
        assert len(running.stdout.read().splitlines()) == 5
    assert running.returncode == 0


def test_a_reader_of_stdout_that_leaves_ends_the_run_without_a_traceback(folder: Path) -> None:
    for number in range(6, 60):
        Path(f"in/{number}.png").write_bytes(png(number))
    with child(folder, "-") as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        errors = running.stderr.read()
    assert (running.returncode, errors) == (1, b"")


@pytest.mark.parametrize(
    ("output", "form", "text"),
    [
        ("out.csv", "jsonl", "change one of them"),
        ("out.jsonl", "csv", "change one of them"),
        ("out.jsonl", "md", "change one of them"),
        ("out.MD", "csv", "change one of them"),
        ("out.xlsx", None, "is not a format"),
        ("out.json", None, "is not a format"),
    ],
)
def test_a_name_that_does_not_match_the_format_is_refused_before_anything_is_written(
    folder: Path, output: str, form: Any, text: str
) -> None:
    Path(output).write_bytes(b"mine")
    with pytest.raises(ValueError, match=text):
        go(output, form=form, engine=NeverStarted())
    assert Path(output).read_bytes() == b"mine" and sorted(os.listdir()) == sorted(["in", output])


def test_rows_of_an_earlier_run_survive_another_format(folder: Path) -> None:
    go("out.jsonl")
    before = Path("out.jsonl").read_bytes()
    with pytest.raises(ValueError, match="change one of them"):
        go("out.jsonl", form="csv")
    assert Path("out.jsonl").read_bytes() == before


@pytest.mark.parametrize("form", ["csv", "md"])
def test_a_table_that_no_run_of_ours_made_is_left_alone(folder: Path, form: str) -> None:
    path = Path(f"mine.{form}")
    path.write_text("a,b\n")
    with pytest.raises(NotAnOutput):
        go(str(path))
    assert path.read_text() == "a,b\n" and not Path(f"mine.{form}.jsonl").exists()
    path.write_text("")
    assert go(str(path))["pages"] == 6 and go(str(path))["pages_kept"] == 6


@pytest.mark.parametrize("form", ["csv", "md", "jsonl"])
def test_what_is_no_regular_file_is_no_output(folder: Path, form: Any) -> None:
    os.mkfifo("pipe")
    os.symlink("/dev/null", "null")
    for output in ("pipe", "null", "in"):
        with pytest.raises((NotAnOutput, CommandError)):
            go(output, form=form)
    assert sorted(os.listdir()) == ["in", "null", "pipe"]
    assert os.readlink("null") == "/dev/null"


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_link_to_an_output_stays_one(folder: Path, name: str) -> None:
    Path("elsewhere").mkdir()
    os.symlink(f"elsewhere/{name}", name)
    go(name)
    Path("in/0.png").write_bytes(png(99))
    go(name)
    assert os.path.islink(name)
    rows = rows_of(next(Path("elsewhere").glob("*.jsonl")))
    assert len(rows) == 6 and Path(name).stat().st_size


def test_an_output_among_the_inputs_is_no_document(folder: Path) -> None:
    """A shell's `*` names it from the second run on; read as a batch file it would never end."""
    go("in/out.jsonl", "in")
    inputs = tuple(sorted(str(path) for path in Path("in").iterdir()))
    assert "in/out.jsonl" in inputs
    numbers = go("in/out.jsonl", *inputs, "in/*", "./in/out.jsonl")
    assert (numbers["pages_kept"], numbers["pages_done"]) == (12, 0) and numbers["skipped_files"] == 3
    with pytest.raises(CommandError, match="no documents"):
        go("in/out.jsonl", "in/out.jsonl")


def test_nothing_left_and_nothing_to_read_start_no_engine(folder: Path) -> None:
    go("out.jsonl")
    assert go("out.jsonl", engine=NeverStarted())["pages_kept"] == 6
    Path("empty").mkdir()
    with pytest.raises(CommandError, match="no documents"):
        go("other.jsonl", "empty", engine=NeverStarted())
    Path("empty/bad.heic").write_bytes(b"junk")
    with pytest.raises(CommandError, match="1 of 1 page failed"):
        go("other.jsonl", "empty", engine=NeverStarted())
    copy = Path("copy.png")
    copy.write_bytes(png(0))
    assert go("out.jsonl", "copy.png", engine=NeverStarted())["duplicates"] == 1


def test_one_page_left_starts_the_engine_once(folder: Path) -> None:
    starts: list[int] = []

    class Counting(FakeEngine):
        async def start(self) -> None:
            starts.append(len(self.submitted))
            await asyncio.sleep(0.05)

    go("out.jsonl", engine=Counting())
    assert starts == [0]
    Path("in/new.png").write_bytes(png(77))
    engine = Counting()
    go("out.jsonl", engine=engine)
    assert starts == [0, 0] and len(engine.submitted) == 1


def test_an_engine_that_does_not_start_ends_the_run_and_leaves_what_was_refused(folder: Path) -> None:
    class Broken(FakeEngine):
        async def start(self) -> None:
            await asyncio.sleep(0.2)
            raise EngineUnavailable("the engine process did not start")

    Path("in/0.png").write_bytes(b"junk")
    with pytest.raises(CommandError, match="did not start; run the same command again"):
        go("out.jsonl", engine=Broken())
    (row,) = rows_of(Path("out.jsonl"))
    assert row["path"] == "in/0.png" and "error" in row


def test_a_start_is_shared_and_can_be_ended() -> None:
    async def run() -> None:
        begun = 0

        async def forever() -> None:
            nonlocal begun
            begun += 1
            await asyncio.Event().wait()

        start = Start(forever)
        waiting = [asyncio.create_task(start()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert begun == 1 and not start.is_done
        await start.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)

    asyncio.run(run())


def test_a_stdout_that_is_closed_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(CommandError, match="stdout is closed"), opened_output(Path("-"), None):
        pass
