"""SIGKILL at three random moments: every page once, and no work twice but what was under way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from vlm.bench.captioning.caption_kills import NUM_KILLS, WINDOW, survive
from vlm.bench.harness.bench_pages import Folder, make_folder

NUM_PAGES = 120
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return make_folder(tmp_path_factory.mktemp("scans") / "in", NUM_PAGES, max_scale=2.0)


def check(kind: str, folder: Folder, tmp_path: Path, seed: int) -> None:
    child = str(TESTS / "caption_child.py")
    made = survive(
        lambda out, log: [sys.executable, child, kind, str(out), str(log), str(folder.path)],
        tmp_path,
        NUM_PAGES,
        seed,
    )
    assert len({row["id"] for row in made.rows}) == len(made.rows) == made.num_pages == NUM_PAGES
    assert made.rewritten == 0, "a row that was durable was lost or moved"
    assert made.orphans == 0, "a child outlived its parent"
    assert len(made.errors) == folder.num_broken
    assert all(Path(row["path"]).name.startswith("broken") for row in made.errors)
    assert len({row["image_sha256"] for row in made.answered}) == len(made.answered)
    assert NUM_PAGES - len(made.errors) - len(made.answered) >= folder.num_copies
    assert len(made.under_way) == NUM_KILLS and all(0 <= count <= WINDOW for count in made.under_way)
    assert made.redone == 0 and len(made.requests) == len(made.answered)


@pytest.mark.slow
def test_a_run_survives_three_kills(folder: Folder, tmp_path: Path) -> None:
    check("fake", folder, tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_the_model_survives_three_kills(folder: Folder, tmp_path: Path) -> None:
    check("real", folder, tmp_path, seed=int(time.time()))
