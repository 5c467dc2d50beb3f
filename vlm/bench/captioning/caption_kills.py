"""`vlm caption` killed at random moments and started again: what was lost, and what was done twice.

`python -m vlm.bench.captioning.caption_kills OUT LOG IN...` is the command, and writes down what its engine
was asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from llm.request import Event, Request, VisualKey
from vlm.bench.harness.bench_pages import Folder, make_folder
from vlm.bench.harness.results import result, say

NUM_KILLS = 3
WINDOW = 24  # pages under way
SOME_FAILED = 3  # exit code
_END_TIMEOUT_S = 900.0

Row = dict[str, Any]
Command = Callable[[Path, Path], list[str]]
"""(output, log) -> command line that captions the folder."""


class LoggedEngine:
    """Any engine; LOG gets the image's key of every request before it begins, and again with a minus sign
    if the image turns out to be broken."""

    def __init__(self, engine: Any, log: Path) -> None:
        self._engine = engine
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> AsyncIterator[Event]:
        self._write(request.prompt.spans[0].key)
        events: AsyncIterator[Event] = self._engine.submit(request)
        return events

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        self._write(f"-{key}")
        await self._engine.fail_tiles(key, code, message)

    def _write(self, line: str) -> None:
        os.write(self._log, f"{line}\n".encode())


@dataclass
class Survival:
    """Of one run over a folder, all its lives together."""

    rows: list[Row] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)  # to the model, by image
    under_way: list[int] = field(default_factory=list)  # requests without a row, per kill
    killed_at: list[int] = field(default_factory=list)  # rows on disk
    rewritten: int = 0  # durable rows that a later life lost or moved
    orphans: int = 0  # processes that outlived a killed parent

    @property
    def answered(self) -> list[Row]:
        """Rows that the model worked for."""
        return [row for row in self.rows if "text" in row and "duplicate_of" not in row]

    @property
    def errors(self) -> list[Row]:
        return [row for row in self.rows if "error" in row]

    @property
    def num_pages(self) -> int:
        return len({(row["path"], row["page"]) for row in self.rows})

    @property
    def redone(self) -> int:
        """Requests beyond one per answered image and those that were under way at a kill."""
        return self.requests.total() - len(self.answered) - sum(self.under_way)


def read_rows(out: Path) -> list[Row]:
    """Whole lines only; the last one may be torn."""
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]] if out.exists() else []


def survive(command: Command, root: Path, num_pages: int, seed: int) -> Survival:
    """Raises RuntimeError if the command ends otherwise than killed, and the last time with 3."""
    out = root / "rows.jsonl"
    moments = sorted(Random(seed).sample(range(4, num_pages - 2 * WINDOW), NUM_KILLS))
    made = Survival()
    for life in range(NUM_KILLS + 1):
        log = root / f"log{life}"
        before = made.rows
        process = subprocess.Popen(command(out, log), cwd=root, env=_environment())
        try:
            if life < NUM_KILLS:
                made.orphans += _kill_at(process, out, max(moments[life], len(before) + 1))
            elif process.wait(_END_TIMEOUT_S) != SOME_FAILED:
                raise RuntimeError(f"the command ended with {process.returncode}")
        finally:
            process.kill()
        made.rows = read_rows(out)
        ids = [row["id"] for row in made.rows]
        made.rewritten += sum(row["id"] != one for row, one in zip(before, ids, strict=False))
        made.rewritten += max(0, len(before) - len(ids))
        requests = _requests(log)
        made.requests.update(requests)
        done = sum("text" in row and "duplicate_of" not in row for row in made.rows[len(before) :])
        if life < NUM_KILLS:
            made.under_way.append(len(requests) - done)
            made.killed_at.append(len(made.rows))
            say(f"killed with {len(made.rows)} of {num_pages} rows on disk")
    return made


def _requests(log: Path) -> list[str]:
    lines = log.read_text().split() if log.exists() else []
    broken = {line[1:] for line in lines if line[0] == "-"}
    return [line for line in lines if line[0] != "-" and line not in broken]


def _kill_at(process: subprocess.Popen[bytes], out: Path, num_rows: int) -> int:
    """Kills once so many rows are written; how many children were left after ten seconds."""
    while len(read_rows(out)) < num_rows:
        if process.poll() is not None:
            raise RuntimeError("it ended before it could be killed")
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return len(psutil.wait_procs(children, timeout=10)[1])


def _environment() -> dict[str, str]:
    ours = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))}


def kills(root: Path, num_pages: int) -> dict[str, Any]:
    """Mixed sizes and formats, a tenth copies, one in fifty broken, PDFs of 20 pages."""
    folder = make_folder(root / "scans", num_pages, pdfs=max(1, num_pages // 125))
    started = time.perf_counter()
    made = survive(
        lambda out, log: [sys.executable, "-m", __name__, str(out), str(log), str(folder.path)],
        root,
        num_pages,
        seed=time.time_ns(),
    )
    return _figures(made, folder, time.perf_counter() - started)


def _figures(made: Survival, folder: Folder, seconds: float) -> dict[str, Any]:
    about = {"model": "vlm-default", "pages": folder.num_pages, "killed_at_rows": made.killed_at}
    wrong = sum(not Path(row["path"]).name.startswith("broken") for row in made.errors)
    return {
        "killed_pages_with_a_row": result(made.num_pages / folder.num_pages, "of all pages", **about),
        "killed_rows_too_many": result(len(made.rows) - made.num_pages, "rows", **about),
        "killed_rows_rewritten": result(made.rewritten, "rows", **about),
        "killed_error_rows": result(
            len(made.errors), "rows", broken=folder.num_broken, of_good_pages=wrong, **about
        ),
        "killed_pages_redone": result(
            made.redone, "pages", under_way_at_kills=made.under_way, requests=made.requests.total(), **about
        ),
        "killed_processes_left": result(made.orphans, "processes", seconds=round(seconds, 1), **about),
    }


def main(arguments: Sequence[str]) -> None:
    from vlm.build import build_served_pipeline
    from vlm.caption.caption_job import CaptionJob, engine_options, run_job
    from vlm.caption.caption_runner import RunOptions
    from vlm.caption.presets import make_question
    from vlm.config import ServeConfig
    from vlm.pipeline import Pipeline

    out, log, *inputs = arguments
    question = make_question(preset="text")

    def logged() -> Pipeline:
        made = build_served_pipeline(ServeConfig(decode_processes=1), engine_options("default", 1, question))
        made.engine = LoggedEngine(made.engine, Path(log))  # type: ignore[assignment]
        return made

    job = CaptionJob(inputs, Path(out), question, options=RunOptions(window=WINDOW), quiet=True)
    run_job(job, logged)


if __name__ == "__main__":
    from vlm.cli.errors import run

    run(lambda: main(sys.argv[1:]))
