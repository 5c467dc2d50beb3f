"""What a run says while it works, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from vlm.caption.inputs import Skipped
from vlm.caption.stats import RunStats
from vlm.cli.file_names import as_text, one_line

LINE_EVERY_S = 10.0
_REDRAW_S = 0.25
_BAR = 12  # columns
_BESIDE_LINE = 1 + 1 + _BAR + 1 + 7 + 1  # spinner, bar and time, each with a space behind it


def counted(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pages_done(stats: RunStats) -> str:
    """`69 pages`, `69 of 200 pages`, `69 of about 1400 pages`."""
    total = stats.total_pages()
    if total is None:
        return counted(stats.num_pages, "page")
    number, is_exact = total
    return f"{stats.num_pages} of {'' if is_exact else 'about '}{counted(number, 'page')}"


def progress_line(stats: RunStats, width: int | None = None) -> str:
    """For example: 69 of 200 pages, 4.1 pages/s, 310 tokens/s, 0:42 left, 2 errors, 9 duplicates.

    width: columns there are; what matters least is left out where it doesn't fit.
    """
    pages_per_s, tokens_per_s = stats.rates()
    left = stats.remaining_s()
    cached = 100 * stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else None
    parts = [  # (text, what it matters: 0 most)
        (pages_done(stats), 0),
        (f"{pages_per_s:.1f} pages/s", 3),
        (f"{tokens_per_s:.0f} tokens/s", 4),
        ("" if left is None else f"{duration(left)} left", 1),
        (counted(stats.errors + stats.errors_kept, "error"), 2),
        (counted(stats.duplicates, "duplicate"), 5),
        ("" if cached is None else f"{cached:.0f}% of prompt tokens cached", 6),
    ]
    for least in range(len(parts), -1, -1):
        line = ", ".join(text for text, rank in parts if text and rank <= least)
        if width is None or len(line) <= width:
            break
    return line


@contextlib.asynccontextmanager
async def progress(stats: RunStats, *, quiet: bool) -> AsyncIterator[None]:
    """A live bar on a terminal, a line every few seconds elsewhere, nothing when quiet."""
    show = None if quiet else _bar(stats) if sys.stderr.isatty() else _lines(stats)
    task = asyncio.create_task(show) if show else None
    try:
        yield
    finally:
        if task:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _lines(stats: RunStats) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        print(progress_line(stats), file=sys.stderr, flush=True)


async def _bar(stats: RunStats) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    numbers = TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), BarColumn(bar_width=_BAR), TimeElapsedColumn(), numbers)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("pages", total=None, line="")
        while True:
            total, _ = stats.total_pages() or (None, False)
            line = progress_line(stats, console.width - _BESIDE_LINE)
            bar.update(task, total=total, completed=stats.num_pages, line=line)
            bar.refresh()
            await asyncio.sleep(_REDRAW_S)


def summary(stats: RunStats, skipped: Skipped, output: str, *, finished: bool) -> dict[str, Any]:
    """The run in numbers, as printed by --json."""
    elapsed_s = stats.elapsed_s
    return {
        "output": output,
        "finished": finished,
        "pages": stats.num_pages,
        "pages_done": stats.pages_done,
        "pages_kept": stats.pages_kept,
        "errors": stats.errors + stats.errors_kept,
        "error_codes": dict(stats.error_codes),
        "warnings": stats.warning_codes.total(),
        "warning_codes": dict(stats.warning_codes),
        "duplicates": stats.duplicates,
        "prompt_tokens": stats.prompt_tokens,
        "image_tokens": stats.image_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "pages_per_min": round(60 * stats.pages_done / elapsed_s, 2) if elapsed_s else 0.0,
        "skipped_files": skipped.num_files,
        "slowest": [
            {"path": as_text(path), "page": page, "total_ms": total_ms}
            for total_ms, path, page in sorted(stats.slowest)[::-1]
        ],
    }


def summary_lines(numbers: dict[str, Any], examples: list[str]) -> list[str]:
    """The same for people."""
    kept = f", {numbers['pages_kept']} kept from earlier" if numbers["pages_kept"] else ""
    equal = f", {numbers['duplicates']} of them equal to another page" if numbers["duplicates"] else ""
    lines = [
        f"{counted(numbers['pages_done'], 'page')} in {duration(numbers['elapsed_s'])} "
        f"({numbers['pages_per_min']:.1f} a minute){equal}{kept} -> {one_line(numbers['output'])}"
    ]
    if numbers["errors"]:
        lines.append(f"{numbers['errors']} failed" + _by_code(numbers["error_codes"]))
    if numbers["warnings"]:
        lines.append(f"{numbers['warnings']} with a warning" + _by_code(numbers["warning_codes"]))
    if numbers["skipped_files"]:
        no_documents = (
            "file is not a document" if numbers["skipped_files"] == 1 else "files are not documents"
        )
        lines.append(
            f"{numbers['skipped_files']} {no_documents}, for example {', '.join(map(one_line, examples))}"
        )
    if numbers["slowest"]:
        lines.append("slowest:")
        for page in numbers["slowest"]:
            lines.append(f"  {page['total_ms'] / 1e3:7.2f} s  {one_line(page['path'])} page {page['page']}")
    return lines


def _by_code(counts: dict[str, int]) -> str:
    codes = ", ".join(f"{code} {count}" for code, count in sorted(counts.items()))
    return f" ({codes})" if codes else ""
