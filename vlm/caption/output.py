"""Where rows go: a file that a later run continues, or stdout."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vlm.caption.journal import Journal, NotAnOutput, OutputBusy
from vlm.caption.rows import Row, encode
from vlm.caption.views.formats import Format, choose_format, journal_path, write_rows, write_view
from vlm.cli.errors import FAILURE, CommandError

STDOUT = "-"


class StreamedJournal(Journal):
    """Tells each row on `stream` too, once it is safe."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        super().__init__(path)
        self._stream = stream
        self._turn = asyncio.Lock()

    async def append(self, row: Row) -> None:
        await super().append(row)
        async with self._turn:
            await asyncio.to_thread(self._tell, encode(row))

    def _tell(self, line: bytes) -> None:
        self._stream.write(line)
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class Output:
    journal: Journal
    form: Format
    path: Path | None  # of the final view; None: stdout
    files: frozenset[str]  # real paths of what is written

    def finish(self, schema: str, *, is_whole: bool) -> None:
        """Writes the final view, of a run that may have been stopped. Raises OSError."""
        if self.path is None:
            if self.form != "jsonl":  # JSON lines were told as they came
                text = io.TextIOWrapper(
                    _stdout(), encoding="utf-8", errors="replace", newline="", write_through=True
                )
                try:
                    write_rows(text, self.form, self.journal.rows(), schema)
                finally:
                    text.detach()  # stdout stays open
            return
        if is_whole:
            self.journal.compact()
        if self.form != "jsonl":
            write_view(self.path, self.form, self.journal.rows(), schema)


@contextlib.contextmanager
def opened_output(output: Path, given: Format | None) -> Iterator[Output]:
    """Raises CommandError, `NotAnOutput`, OSError and ValueError before anything is written."""
    if str(output) == STDOUT:
        with tempfile.TemporaryDirectory(prefix="vlm-caption-") as folder:
            form = given or "jsonl"
            path = Path(folder) / "rows.jsonl"
            journal = StreamedJournal(path, _stdout()) if form == "jsonl" else Journal(path)
            with contextlib.closing(journal):
                yield Output(journal, form, None, frozenset())
        return
    form = choose_format(output, given)
    path = Path(os.path.realpath(output))  # a link stays one
    rows_path = journal_path(path, form)
    if form != "jsonl":
        _check_view(output, path, rows_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal(rows_path)
    except OutputBusy as error:
        raise CommandError(str(error), FAILURE) from None
    with contextlib.closing(journal):
        yield Output(journal, form, path, frozenset({str(path), str(rows_path)}))


def _check_view(output: Path, path: Path, rows_path: Path) -> None:
    """Raises NotAnOutput for what the final view would replace although no run of ours made it."""
    if not path.exists():
        return
    if not path.is_file():
        raise NotAnOutput(f"{output} is not a regular file (rows go to stdout with: -o -)")
    if path.stat().st_size and not rows_path.exists():
        raise NotAnOutput(
            f"{output} exists, and {rows_path.name} beside it, which a run would continue, does not: "
            "choose another name or move it away"
        )


def _stdout() -> BinaryIO:
    if sys.stdout is None:  # where the caller closed it
        raise CommandError("stdout is closed", FAILURE)
    return sys.stdout.buffer
