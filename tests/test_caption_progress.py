"""What a run says of itself fits the terminal and is true."""

from __future__ import annotations

import asyncio
import os
import pty
import re
from pathlib import Path

import pytest
from caption_fakes import FakeEngine, pdf, png, run
from hypothesis import given
from hypothesis import strategies as st

from vlm.caption.caption_progress import pages_done, progress, progress_line
from vlm.caption.caption_runner import CaptionRun
from vlm.caption.inputs import find_sources
from vlm.caption.stats import RunStats

COUNTS = st.integers(0, 9_999_999)


def drawn(stats: RunStats, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last state of the bar on a terminal of so many columns, without its colours."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)

        async def show() -> None:
            async with progress(stats, quiet=False):
                await asyncio.sleep(0.1)

        asyncio.run(show())
        terminal.flush()
        data = os.read(leader, 1 << 16).decode()
    os.close(leader)
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data).splitlines() if "pages" in line]
    return lines[-1].strip("\r")


def test_the_bar_says_how_many_of_how_many_and_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = RunStats(
        pages_done=69,
        sources_found=200,
        all_found=True,
        sources_known=80,
        pages_known=80,
        errors=12,
        duplicates=3,
        prompt_tokens=90_000,
        cached_tokens=30_000,
        completion_tokens=10_000,
    )
    line = drawn(stats, 80, monkeypatch)
    assert "69 of 200 pages" in line and "12 errors" in line
    assert len(line) <= 80 and "…" not in line
    assert len(re.findall("[━╸╺]", line)) == 12, "the bar"
    assert "% of prompt tokens cached" in drawn(stats, 200, monkeypatch)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.integers(57, 200))
def test_the_line_fits_and_leaves_out_what_matters_least(
    done: int, more: int, errors: int, duplicates: int, width: int
) -> None:
    stats = RunStats(
        pages_done=done,
        sources_found=done + more + 1,
        all_found=True,
        sources_known=done + 1,
        pages_known=done + 1,
        errors=errors,
        duplicates=duplicates,
        prompt_tokens=100,
    )
    line = progress_line(stats, width)
    assert len(line) <= width
    assert line.startswith(f"{done} of {done + more + 1} page")
    assert set(line.split(", ")) <= set(progress_line(stats).split(", "))
    assert not ("duplicate" in line and "error" not in line)


@pytest.mark.parametrize(
    ("done", "kept", "files", "all_found", "files_known", "pages_known", "text"),
    [
        (0, 0, 0, False, 0, 0, "0 pages"),
        (1, 0, 0, False, 0, 0, "1 page"),
        (3, 0, 5, False, 4, 4, "3 pages"),
        (69, 0, 200, True, 70, 70, "69 of 200 pages"),
        (5, 0, 4, True, 2, 20, "5 of about 40 pages"),
        (5, 0, 4, True, 4, 20, "5 of 20 pages"),
        (9, 1, 1, True, 1, 10, "10 of 10 pages"),
        (9, 0, 1, True, 1, 8, "9 of 9 pages"),
    ],
)
def test_a_total_is_named_once_it_is_known_and_a_guess_is_called_one(
    done: int, kept: int, files: int, all_found: bool, files_known: int, pages_known: int, text: str
) -> None:
    stats = RunStats(
        pages_done=done,
        pages_kept=kept,
        sources_found=files,
        all_found=all_found,
        sources_known=files_known,
        pages_known=pages_known,
    )
    assert pages_done(stats) == text


def test_at_the_end_all_pages_are_known_and_done(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    Path("in/b.pdf").write_bytes(pdf([2, 3, 4]))
    Path("in/bad.png").write_bytes(b"junk")
    Path("in/c.heic").write_bytes(b"junk")
    Path("lines.jsonl").write_text("not json\n\nnor this\n")
    inputs = ["in", "lines.jsonl", "in/a.png"]
    for kept in (0, 7):
        stats = run(out, *inputs, engine=FakeEngine(), started=lambda made: see_all(made, inputs))
        assert stats.pages_kept >= kept
        total = stats.total_pages()
        assert total == (stats.num_pages, True)
        assert stats.remaining_s() in (0.0, None)


def test_a_page_that_is_named_twice_while_it_is_under_way_counts_once(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    engine = FakeEngine(delay_s=0.1)
    stats = run(out, "in", "in", engine=engine, started=lambda made: see_all(made, ["in", "in"]))
    assert stats.total_pages() == (1, True) and stats.num_pages == 1


def see_all(made: CaptionRun, inputs: list[str]) -> None:
    made.stats.sources_found = sum(1 for _ in find_sources(inputs))
    made.stats.all_found = True
