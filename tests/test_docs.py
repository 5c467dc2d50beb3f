"""Pages that follow from the code are current, and what they and the README name exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current() -> None:
    stale = [path for path, text in generated().pages().items() if (ROOT / path).read_text() != text]
    assert not stale, "run python docs/generate.py"


@pytest.mark.parametrize(
    "page",
    [
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    packages = "vlm|workers|llm|encoder|preprocess|tests|scripts|docs"
    named = set(re.findall(rf"`((?:{packages})/[\w./]+\.(?:py|md|cpp|json))`", text))
    named |= set(re.findall(r"\]\(((?!http)[\w./-]+)\)", text))
    beside = (ROOT / page).parent
    missing = [name for name in named if not ((ROOT / name).exists() or (beside / name).exists())]
    assert not missing


def test_error_codes_that_the_page_of_the_api_names_exist() -> None:
    _, _, errors = (ROOT / "docs/http.md").read_text().partition("## Errors")
    rows = [line.split("|")[2] for line in errors.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([a-z_]+)`", "".join(rows)))
    packages = ("vlm", "workers", "llm", "preprocess")
    sources = "".join(path.read_text() for name in packages for path in (ROOT / name).rglob("*.py"))
    assert len(named) > 20 and not {code for code in named if f'"{code}"' not in sources}
