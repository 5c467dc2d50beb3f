"""Tests are tested: each edit of `mutations.py`, made in a copy of the tree, fails one of its tests."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation
from scripts_of import ROOT, load_script

tracked = load_script("scripts/dockerfile_steps.py").tracked
PASSED, FAILED = 0, 1  # pytest's exit status; others mean that it could not run the tests


def run(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Of these tests, stopping at the first that fails; the tree's own modules come first. What they leave
    to the collector at their end is looked at where the whole suite runs them, not here."""
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command += ["-p", "no:unraisableexception"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=tree, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for path in tracked("."):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # some tests ask git for the files
    return copy


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_an_edits_place_and_its_tests_are_there(mutation: Mutation) -> None:
    path = ROOT / mutation.file
    assert path.is_file(), f"{mutation.file} has moved: say in tests/mutations.py where to"
    assert path.read_text().count(mutation.old) == 1, f"{mutation.file} does not hold {mutation.old!r} once"
    for test in mutation.tests:
        file, _, function = test.partition("::")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert not function or function in functions, f"{test} is not there"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_nearest_tests_pass_without_an_edit(tree: Path) -> None:
    """And in the copy: an edit must be what fails them."""
    status, output = run(tree, tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests})))
    assert status == PASSED, output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_an_edit_is_caught(mutation: Mutation, tree: Path) -> None:
    path = tree / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} does not hold {mutation.old!r} once"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, output = run(tree, mutation.tests)
    finally:
        path.write_text(text)
    assert status != PASSED, f"nobody noticed that {mutation.name}"
    assert status == FAILED, output
