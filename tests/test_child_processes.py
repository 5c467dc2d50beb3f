"""Child processes run our code whatever lies in the folder that a command is called from."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from caption_fakes import pdf

from llm.constraints.grammar import GrammarError, GrammarLimits
from vlm.api.batches import batch_check
from vlm.build import engine_command
from vlm.config import EngineOptions
from workers.children.child import child_environment
from workers.children.grammar_process import GrammarProcess
from workers.contract.stages import StageUnavailable
from workers.local import preprocess_pool
from workers.local.page_drawing import PageRenderer
from workers.local.preprocess_pool import LocalPreprocess


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's, as a download may be: files named after modules leave a mark when they are run."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "json",
        "numpy",
        "PIL",
        "preprocess",
        "workers",
        "vlm",
        "torch",
        "pypdfium2",
        "llguidance",
        "llm",
    ):
        Path(f"{name}.py").write_text("open('RAN', 'w').close()\nraise RuntimeError('a stranger's code')\n")
    return tmp_path


def test_pages_are_drawn_and_images_decoded(folder: Path) -> None:
    Path("a.pdf").write_bytes(pdf([1]))

    async def run() -> None:
        renderer = PageRenderer()
        pool = LocalPreprocess(1)
        try:
            assert await renderer.count("a.pdf") == 1
            await pool.start()
        finally:
            await pool.close()
            await renderer.close()

    asyncio.run(run())
    assert not Path("RAN").exists()


def test_the_engine_process_starts(folder: Path) -> None:
    command = [*engine_command(EngineOptions()), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60)
    assert done.returncode == 0 and "--options" in done.stdout
    assert not Path("RAN").exists()


def test_constraints_are_tried(folder: Path) -> None:
    check = GrammarProcess((*(bytes([i]) for i in range(256)), b"</s>"), frozenset({256}), GrammarLimits())
    try:
        check.check("regex", "a")
        with pytest.raises(GrammarError):
            check.check("regex", "(a")
    finally:
        check.close()
    assert not Path("RAN").exists()


def test_inputs_of_batches_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_check, "LARGE_BYTES", 0)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    Path("rows.jsonl").write_text(json.dumps(row))
    checked = batch_check.check(Path("rows.jsonl"), "/v1/chat/completions", Path("index.jsonl"))
    assert asyncio.run(checked) == (1, [])
    assert not Path("RAN").exists()


def test_a_decode_process_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_pool, "module_command", lambda _: [sys.executable, "-c", "pass"])

    async def run() -> None:
        pool = LocalPreprocess(1)
        with pytest.raises(StageUnavailable, match="did not start"):
            await pool.start()
        await pool.close()

    asyncio.run(run())
