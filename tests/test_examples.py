"""Each example runs as its own text says, against a server with the default model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_serve import LiveServe, vlm_serve

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "ask": ["258.92"],
    "many_questions": ["Ze Deli", "258.92", "from the cache"],
    "estimate": ["invoice.png: ", "An invoice from Ze Deli"],
    "fields": ['"seller": "', '"total": "'],
    "batch": ["completed: 2 of 2", "invoice.png: An invoice from Ze Deli"],
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServe]:
    with vlm_serve(tmp_path_factory.mktemp("serve")) as running:
        yield running


def command(example: Path) -> list[str]:
    """Of the docstring, its file patterns expanded as a shell does."""
    (line,) = re.findall(r"^Example: python (examples/.*)$", example.read_text(), re.MULTILINE)
    found = []
    for word in shlex.split(line):
        found += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(word)) if "*" in word else [word]
    return found


def test_the_readme_of_the_examples_names_each() -> None:
    text = (ROOT / "examples/README.md").read_text()
    assert set(re.findall(r"\((\w+)\.py\)", text)) == {path.stem for path in EXAMPLES} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_says(live: LiveServe, example: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command(example), "--url", live.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for text in SAYS[example.stem]:
        assert text in done.stdout
