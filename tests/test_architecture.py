"""The packages import one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "preprocess": set(),
    "encoder": set(),
    "llm": set(),
    "workers": {"preprocess", "encoder", "llm"},
    "vlm": {"workers", "preprocess", "encoder", "llm"},
}


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in sources(package):
        ours = {name.split(".")[0] for name in imported_modules(path)} & MAY_IMPORT.keys()
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {ours - allowed}"


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and for type checkers count too."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in MAY_IMPORT
        for path in sources(package)
    }
    graph = {}
    for name, path in paths.items():
        found = imported_modules(path) & paths.keys() - {name}
        parts = {module for module in found if any(other.startswith(f"{module}.") for other in found)}
        graph[name] = found - parts  # `from package import part` is an import of the part
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_file_outgrows_its_reader() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for package in MAY_IMPORT
        for path in sources(package)
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long, f"split these: {long}"


TORCH_FREE = [
    "preprocess.stage",
    "encoder.geometry",
    "llm.engine",
    "llm.scheduling.scheduler",
    "llm.cost",
    "llm.sampling.sampler",
    "llm.text.tokenizer",
    "workers.contract.messages",
    "workers.cluster.blobs",
    "workers.cluster.worker.tasks",
    "vlm.spec",
    "vlm.prompt",
    "vlm.cli.main",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_bookkeeping_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_nothing_is_unpickled_or_loaded_as_code() -> None:
    """users.md, advisories: JSON on the wire, safetensors only."""
    for package in MAY_IMPORT:
        for path in sources(package):
            text = path.read_text()
            assert "pickle" not in {name.split(".")[0] for name in imported_modules(path)}, path
            assert "torch.load(" not in text, path
            assert "trust_remote_code=True" not in text, path
