"""SIGKILL at three random moments: every page once, and no work twice but what was under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from caption_child import WINDOW

from vlm.bench.pages import Folder, make_folder

NUM_PAGES = 120
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_folder(tmp_path_factory.mktemp("scans") / "in", NUM_PAGES, max_scale=2.0)


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Whole lines only; the last one may be torn."""
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def start(kind: str, out: Path, log: Path, folder: Folder) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    command = [sys.executable, str(TESTS / "caption_child.py"), kind, str(out), str(log), str(folder.path)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, cwd=out.parent)


def kill_at(process: subprocess.Popen[bytes], out: Path, num_rows: int) -> list[psutil.Process]:
    """Kills once `num_rows` rows are written; returns the children that were left."""
    while len(read_rows(out)) < num_rows:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return children


def survive(kind: str, folder: Folder, tmp_path: Path, seed: int) -> None:
    out = tmp_path / "rows.jsonl"
    rng = Random(seed)
    moments = sorted(rng.sample(range(4, NUM_PAGES - WINDOW), 3))
    submitted: Counter[str] = Counter()
    under_way = 0
    seen: list[str] = []  # ids in the order they became durable
    for life in range(4):
        log = tmp_path / f"log{life}"
        before = len(read_rows(out))
        process = start(kind, out, log, folder)
        try:
            if life < 3:
                children = kill_at(process, out, max(moments[life], before + 1))
            else:
                assert process.wait(300) == 3  # some pages are broken
                children = []
        finally:
            process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "a child outlived its parent"
        rows = read_rows(out)
        ids = [row["id"] for row in rows]
        assert ids[: len(seen)] == seen  # nothing that was durable was lost or rewritten
        seen = ids
        lines = log.read_text().split() if log.exists() else []
        requests = [line for line in lines if line[0] != "-" and f"-{line}" not in lines]
        submitted.update(requests)
        done = sum("text" in row and "duplicate_of" not in row for row in rows[before:])
        lost = len(requests) - done
        assert 0 <= lost <= (WINDOW if life < 3 else 0)
        under_way += lost
    rows = read_rows(out)
    assert len(rows) == len({row["id"] for row in rows}) == NUM_PAGES
    assert len({(row["path"], row["page"]) for row in rows}) == NUM_PAGES
    errors = [row for row in rows if "error" in row]
    assert len(errors) == folder.num_broken
    assert all(Path(row["path"]).name.startswith("broken") for row in errors)
    originals = [row for row in rows if "text" in row and "duplicate_of" not in row]
    assert len({row["image_sha256"] for row in originals}) == len(originals)
    assert NUM_PAGES - len(errors) - len(originals) >= folder.num_copies
    assert sum(submitted.values()) == len(originals) + under_way
    assert len(submitted) == len(originals)


@pytest.mark.slow
def test_a_run_survives_three_kills(folder: Folder, tmp_path: Path) -> None:
    survive("fake", folder, tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_the_model_survives_three_kills(folder: Folder, tmp_path: Path) -> None:
    survive("real", folder, tmp_path, seed=int(time.time()))
