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


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in sources(package):
        ours = {name.split(".")[0] for name in imported_modules(path)} & MAY_IMPORT.keys()
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {ours - allowed}"


# Rooms of a package, and the other rooms of it that each may import. Files of the package's own folder are
# in the room named after it, but for the engine's: they are on top of every other room.
ROOMS = {
    "workers.contract": set(),
    "workers.children": {"workers.contract"},
    "workers.local": {"workers.contract", "workers.children"},
    "workers.anymodel": {"workers.contract"},
    "workers.cluster": {"workers.contract"},
    "workers.cluster.node": {"workers.contract", "workers.cluster"},
    "workers.cluster.worker": {"workers.contract", "workers.children", "workers.local", "workers.cluster"},
    "llm": set(),  # the words that every room uses: requests, configurations, storage
    "llm.cost": {"llm"},
    "llm.text": {"llm"},
    "llm.sampling": {"llm"},
    "llm.constraints": {"llm"},
    "llm.backend": {"llm", "llm.cost"},
    "llm.backend.cuda": {"llm", "llm.backend"},
    "llm.checkpoint": {"llm", "llm.cost", "llm.backend", "llm.backend.cuda"},
    "llm.scheduling": {"llm", "llm.backend", "llm.constraints", "llm.sampling", "llm.text"},
    "the engine": {"llm", "llm.backend", "llm.constraints", "llm.sampling", "llm.scheduling", "llm.text"},
}
THE_ENGINE = {"llm.engine", "llm.commit", "llm.beam_rounds", "llm.engine_stats"}
MOST_FILES = 15


def room_of(module: str) -> str:
    return "the engine" if module in THE_ENGINE else module.rpartition(".")[0]


@pytest.mark.parametrize("package", ["workers", "llm"])
def test_rooms_import_downwards(package: str) -> None:
    paths = {module_name(path): path for path in sources(package) if path.name != "__init__.py"}
    for name, path in paths.items():
        room = room_of(name)
        found = imported_modules(path) & paths.keys()
        used = {room_of(module) for module in found} - {room}
        assert used <= ROOMS[room], f"{name} imports {used - ROOMS[room]}"


def test_no_room_is_crowded() -> None:
    crowded = {
        str(folder): count
        for package in MAY_IMPORT
        for folder in {path.parent for path in sources(package)}
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MOST_FILES
    }
    assert not crowded, f"give these rooms: {crowded}"


def test_every_package_names_its_front_door() -> None:
    """Three lines or so in `__init__.py`: what the room is for, and where to enter it."""
    for package in MAY_IMPORT:
        for path in sources(package):
            if path.name == "__init__.py":
                assert ast.get_docstring(ast.parse(path.read_text())), (
                    f"{path.relative_to(ROOT)} says nothing"
                )


def test_no_module_imports_itself_through_others() -> None:
    """Imports within functions and for type checkers count too."""
    paths = {module_name(path): path for package in MAY_IMPORT for path in sources(package)}
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


# Of the training of the demonstration model, which carries twins of the product's classes.
TRAINING_TWINS = {"Model", "Progress", "PromptBuilder", "Sequence", "Shape"}


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for package in MAY_IMPORT:
        for path in sources(package):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {
        name: paths
        for name, paths in homes.items()
        if len(paths) > 1 and not (name in TRAINING_TWINS and any("vlm/train/" in path for path in paths))
    }
    assert not shared, f"give these names of their own: {shared}"


EVERY_ROOMS_OWN = {"__init__", "base", "cli", "errors"}  # each room's, with the same meaning in all


def test_a_module_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for package in MAY_IMPORT:
        for path in sources(package):
            home = str(path.relative_to(ROOT))
            if path.stem not in EVERY_ROOMS_OWN and not home.startswith("vlm/train/"):
                homes.setdefault(path.stem, []).append(home)
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not shared, f"give these names of their own: {shared}"


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


def test_the_api_and_captioning_stand_side_by_side() -> None:
    """What both need of a client's request is in `vlm.requests`, which knows neither."""
    forbidden = {
        "vlm/api": "vlm.caption",
        "vlm/caption": "vlm.api",
        "vlm/requests": ("vlm.api", "vlm.caption"),
    }
    for folder, prefixes in forbidden.items():
        for path in sources(folder):
            found = {name for name in imported_modules(path) if name.startswith(prefixes)}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"
