"""What a run says while it works, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from vlm.caption.inputs import Skipped
from vlm.caption.stats import RunStats

LINE_EVERY_S = 10.0
_REDRAW_S = 0.25


def counted(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_line(stats: RunStats) -> str:
    """For example: 120 pages, 4.1 pages/s, 310 tokens/s, 0:42 left, 2 errors, 9 duplicates, 61% cached."""
    pages_per_s, tokens_per_s = stats.rates()
    parts = [counted(stats.num_pages, "page"), f"{pages_per_s:.1f} pages/s", f"{tokens_per_s:.0f} tokens/s"]
    left = stats.remaining_s()
    if left is not None:
        parts.append(f"{duration(left)} left")
    parts.append(counted(stats.errors + stats.errors_kept, "error"))
    parts.append(counted(stats.duplicates, "duplicate"))
    if stats.prompt_tokens:
        parts.append(f"{100 * stats.cached_tokens / stats.prompt_tokens:.0f}% of prompt tokens cached")
    return ", ".join(parts)


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
    columns = (SpinnerColumn(), BarColumn(bar_width=12), TimeElapsedColumn(), numbers)
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("pages", total=None, line=progress_line(stats))
        while True:
            total = stats.sources_found or None
            bar.update(task, total=total, completed=stats.sources_done, line=progress_line(stats))
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
        "duplicates": stats.duplicates,
        "prompt_tokens": stats.prompt_tokens,
        "image_tokens": stats.image_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "pages_per_min": round(60 * stats.pages_done / elapsed_s, 2) if elapsed_s else 0.0,
        "skipped_files": skipped.num_files,
        "slowest": [
            {"path": path, "page": page, "total_ms": total_ms}
            for total_ms, path, page in sorted(stats.slowest)[::-1]
        ],
    }


def summary_lines(numbers: dict[str, Any], examples: list[str]) -> list[str]:
    """The same for people."""
    kept = f", {numbers['pages_kept']} kept from earlier" if numbers["pages_kept"] else ""
    equal = f", {numbers['duplicates']} of them equal to another page" if numbers["duplicates"] else ""
    lines = [
        f"{counted(numbers['pages_done'], 'page')} in {duration(numbers['elapsed_s'])} "
        f"({numbers['pages_per_min']:.1f} a minute){equal}{kept} -> {numbers['output']}"
    ]
    if numbers["errors"]:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(numbers["error_codes"].items()))
        lines.append(f"{numbers['errors']} failed" + (f" ({codes})" if codes else ""))
    if numbers["skipped_files"]:
        no_documents = "file is no document" if numbers["skipped_files"] == 1 else "files are no documents"
        lines.append(f"{numbers['skipped_files']} {no_documents}, for example {', '.join(examples)}")
    if numbers["slowest"]:
        lines.append("slowest:")
        for page in numbers["slowest"]:
            lines.append(f"  {page['total_ms'] / 1e3:7.2f} s  {page['path']} page {page['page']}")
    return lines
