"""What the README says to type works as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from fake_engine_client import live_server
from live_serve import vlm_serve

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "http://127.0.0.1:8000"


def python_snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def printed_by(snippet: str, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs it in the repository's folder, with the server's address alone replaced."""
    assert snippet.count(ADDRESS) == 1
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet.replace(ADDRESS, url), "README.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_python_snippet_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = python_snippets()
    with live_server() as server:
        assert printed_by(snippet, server.url, monkeypatch).startswith("I saw 1 images in ")


@pytest.mark.slow
def test_the_python_snippet_tells_what_is_in_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = python_snippets()
    with vlm_serve(tmp_path) as server:
        assert "An invoice from Ze Deli." in printed_by(snippet, server.url, monkeypatch)
