"""A caption run in a process of its own, to be killed: `caption_child.py fake|real OUT LOG IN...`.

LOG is `vlm.bench.captioning.caption_kills.LoggedEngine`'s.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vlm.bench.captioning.caption_kills import WINDOW, LoggedEngine
from vlm.build import build_served_pipeline
from vlm.caption.caption_job import CaptionJob, run_job
from vlm.caption.caption_runner import RunOptions
from vlm.caption.presets import make_question
from vlm.cli.errors import run
from vlm.config import EngineOptions, ServeConfig
from vlm.pipeline import Pipeline


def pipeline(kind: str, log: Path) -> Pipeline:
    if kind == "fake":
        from caption_fakes import FakeEngine, fake_pipeline

        made = fake_pipeline(FakeEngine(delay_s=0.05))
    else:
        made = build_served_pipeline(ServeConfig(decode_processes=1), EngineOptions(kv_cache_mb=64))
    made.engine = LoggedEngine(made.engine, log)  # type: ignore[assignment]
    return made


def main() -> None:
    kind, out, log, *inputs = sys.argv[1:]
    question = make_question(preset="text", max_tokens=24, dpi=72)
    job = CaptionJob(inputs, Path(out), question, options=RunOptions(window=WINDOW), quiet=True)
    run_job(job, lambda: pipeline(kind, Path(log)))


if __name__ == "__main__":
    run(main)
