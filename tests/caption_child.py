"""A caption run in a process of its own, to be killed: `caption_child.py fake|real OUT LOG IN...`.

LOG gets a line for every request that reaches the engine, the key of its image, and one with a minus sign for
every image that turned out to be broken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from llm.request import Event, Request, VisualKey
from vlm.build import build_served_pipeline
from vlm.caption.app import CaptionJob, run_job
from vlm.caption.presets import make_question
from vlm.caption.runner import RunOptions
from vlm.cli.errors import run
from vlm.config import EngineOptions, ServeConfig
from vlm.pipeline import Pipeline

WINDOW = 24


class LoggedEngine:
    """Any engine, with its requests written down before they begin."""

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


def pipeline(kind: str, log: Path) -> Pipeline:
    if kind == "fake":
        from caption_fakes import FakeEngine, fake_pipeline

        made = fake_pipeline(FakeEngine(delay_s=0.05))
    else:
        made = build_served_pipeline(ServeConfig(decode_processes=1), EngineOptions(kv_cache_mb=64))
    made.engine = LoggedEngine(made.engine, log)
    return made


def main() -> None:
    kind, out, log, *inputs = sys.argv[1:]
    question = make_question(preset="text", max_tokens=24, dpi=72)
    job = CaptionJob(inputs, Path(out), question, options=RunOptions(window=WINDOW), quiet=True)
    run_job(job, lambda: pipeline(kind, Path(log)))


if __name__ == "__main__":
    run(main)
