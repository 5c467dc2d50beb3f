"""`vlm caption` as a user meets it: exit codes, messages, summary, interruption."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import pty
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import FakeEngine, fake_pipeline, png, rows_of

from llm.request import Event, Failed, Request
from vlm.caption.caption_job import CaptionJob, run_job
from vlm.caption.caption_progress import duration, progress, progress_line
from vlm.caption.caption_runner import RunOptions
from vlm.caption.journal import Journal
from vlm.caption.presets import make_question
from vlm.caption.stats import RunStats
from vlm.cli.errors import CommandError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for number in range(6):
        Path(f"in/{number}.png").write_bytes(png(number))
    return tmp_path


def job(output: str = "out.jsonl", inputs: tuple[str, ...] = ("in",), **more: Any) -> CaptionJob:
    return CaptionJob(inputs, Path(output), make_question(preset="caption"), **more)


def exit_code(command: Callable[[], object]) -> tuple[int, str]:
    try:
        command()
    except CommandError as error:
        return error.exit_code, str(error)
    return 0, ""


def go(**more: Any) -> tuple[int, str]:
    engine = more.pop("engine", None) or FakeEngine()
    return exit_code(lambda: run_job(job(**more), lambda: fake_pipeline(engine)))


def test_a_clean_run_ends_with_zero_and_a_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(as_json=True) == (0, "")
    printed = capsys.readouterr()
    numbers = json.loads(printed.out.splitlines()[-1])
    assert (numbers["pages"], numbers["errors"], numbers["finished"]) == (6, 0, True)
    assert len(numbers["slowest"]) == 5
    times = [page["total_ms"] for page in numbers["slowest"]]
    assert times == sorted(times, reverse=True)
    assert "6 pages in 0:0" in printed.err and "slowest:" in printed.err


def test_failed_pages_give_three_also_when_an_earlier_run_met_them(folder: Path) -> None:
    Path("in/bad.png").write_bytes(b"junk")
    for _ in range(2):
        assert go(quiet=True) == (3, "1 of 7 pages failed; see out.jsonl")
    Path("in/bad.png").unlink()
    Path("in/bad.png").write_bytes(png(9))
    assert go(quiet=True) == (0, "")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"inputs": ("nowhere",)}, "does not exist"),
        ({"output": "in/0.png"}, "not a format"),
        ({"output": "in/0.png", "form": "jsonl"}, "not an output"),
        ({"inputs": ("in/empty",)}, "no documents"),
    ],
)
def test_bad_input_gives_two(folder: Path, more: dict[str, Any], text: str) -> None:
    from vlm.cli.errors import _exit_code

    Path("in/empty").mkdir()
    with pytest.raises(Exception, match=text) as caught:
        run_job(job(**more), lambda: fake_pipeline(FakeEngine()))
    assert _exit_code(caught.value) == 2
    assert Path("in/0.png").read_bytes() == png(0)


def test_an_output_that_is_being_written_gives_one(folder: Path) -> None:
    held = Journal(Path("out.jsonl"))
    code, text = go()
    assert code == 1 and "another run is writing" in text
    held.close()


def test_an_engine_that_never_starts_gives_one_and_the_output_stays_usable(folder: Path) -> None:
    from workers.contract.engine_client import EngineUnavailable

    engine = FakeEngine()

    async def start() -> None:
        raise EngineUnavailable("the engine process did not start")

    engine.start = start  # type: ignore[method-assign]
    code, text = go(engine=engine, quiet=True)
    assert code == 1 and "run the same command again" in text
    assert go(quiet=True)[0] == 0


def test_an_error_of_another_file_is_not_laid_on_the_output(folder: Path) -> None:
    engine = FakeEngine()

    async def start() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/usr/bin/child")

    engine.start = start  # type: ignore[method-assign]
    assert go(engine=engine, quiet=True) == (1, "/usr/bin/child: Permission denied")


def test_a_summary_that_cannot_be_printed_is_not_laid_on_the_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError) as caught:
        go(as_json=True, quiet=True)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, None)
    assert len(rows_of(Path("out.jsonl"))) == 6


def test_a_schema_that_the_engine_refuses_ends_the_run_at_once(folder: Path) -> None:
    def refuse(request: Request) -> Event | None:
        if request.params.constraint is None:
            return None
        return Failed(request.id, "invalid_constraint", "The grammar is too large.")

    question = make_question(preset="fields")
    engine = FakeEngine(refuse)
    made = CaptionJob(("in",), Path("out.jsonl"), question, quiet=True)
    code, text = exit_code(lambda: run_job(made, lambda: fake_pipeline(engine)))
    assert (code, text) == (2, "the schema can't be used: The grammar is too large.")
    assert len(engine.submitted) == 1 and rows_of(Path("out.jsonl")) == []


@pytest.mark.parametrize("form", ["csv", "md"])
def test_other_formats_are_views_that_resume_too(folder: Path, form: str) -> None:
    assert go(output=f"out.{form}", quiet=True)[0] == 0
    view = Path(f"out.{form}").read_text()
    engine = FakeEngine()
    assert go(output=f"out.{form}", quiet=True, engine=engine)[0] == 0
    assert not engine.submitted and Path(f"out.{form}").read_text() == view
    assert [view.index(f"in/{number}.png") for number in range(6)] == sorted(
        view.index(f"in/{number}.png") for number in range(6)
    )


def interrupt_when(condition: Callable[[], bool], number: int = signal.SIGINT) -> threading.Thread:
    def wait() -> None:
        while not condition():
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_finishes_what_is_under_way(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    engine = FakeEngine(delay_s=0.2)
    thread = interrupt_when(lambda: engine.running >= 2, number)
    code, text = go(engine=engine, options=RunOptions(window=2))
    thread.join()
    assert code == 130 and "run the same command again to go on" in text
    assert "press Ctrl-C again" in capsys.readouterr().err
    assert len(rows_of(Path("out.jsonl"))) == len(engine.submitted) < 6
    assert go(quiet=True)[0] == 0
    assert len(rows_of(Path("out.jsonl"))) == 6


def test_the_second_interrupt_drops_what_is_under_way_and_keeps_the_rest(folder: Path) -> None:
    engine = FakeEngine()
    finished = 0

    def hold_later_ones(request: Any) -> None:
        nonlocal finished
        finished += 1
        if finished > 2:
            engine.gate.clear()

    engine._on_submit = hold_later_ones  # type: ignore[assignment]

    def twice() -> None:
        while finished < 3 or engine.running < 1:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=twice)
    thread.start()
    code, _ = go(engine=engine, options=RunOptions(window=1), quiet=True)
    thread.join()
    assert code == 130
    assert len(rows_of(Path("out.jsonl"))) == 2
    assert engine.running == 0
    assert go(quiet=True)[0] == 0


def test_progress_is_a_plain_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm.caption.caption_progress.LINE_EVERY_S", 0.01)

    async def run(quiet: bool) -> None:
        async with progress(RunStats(), quiet=quiet):
            await asyncio.sleep(0.1)

    asyncio.run(run(quiet=True))
    assert capsys.readouterr() == ("", "")
    asyncio.run(run(quiet=False))
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("0 pages, 0.0 pages/s, 0 tokens/s") and "\x1b" not in err


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)

        async def run() -> None:
            async with progress(
                RunStats(sources_found=4, all_found=True, sources_known=2, pages_known=2), quiet=False
            ):
                await asyncio.sleep(0.1)

        asyncio.run(run())
        terminal.flush()
        drawn = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "\x1b[" in drawn and "0 of 4 pages" in drawn


def test_the_line_says_what_is_left() -> None:
    stats = RunStats(
        sources_found=40,
        all_found=True,
        sources_known=10,
        pages_known=21,
        prompt_tokens=200,
        cached_tokens=50,
    )
    stats.started -= 10
    for number in range(20):
        usage = {"prompt_tokens": 0, "image_tokens": 0, "cached_tokens": 0, "completion_tokens": 30}
        stats.add({"path": "a", "page": number, "usage": usage, "timings": {"total_ms": number}})
    stats.add({"path": "b", "page": 1, "error": {"code": "invalid_image", "message": ""}})
    line = progress_line(stats)
    assert line.startswith(
        "21 of about 84 pages, 2.1 pages/s, 60 tokens/s, 0:30 left, 1 error, 0 duplicates, 25% of"
    )
    assert [page for _, _, page in sorted(stats.slowest)] == [15, 16, 17, 18, 19]
    assert duration(3725) == "1:02:05" and duration(59.6) == "1:00"
