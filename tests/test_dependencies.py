"""What is imported is declared, what is declared is used, and private parts of other packages are where we
take them to be: an update that moves one fails here in one line, not in production."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vlm.config import SettingsError
from vlm.extras import require

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {"preprocess", "encoder", "llm", "workers", "vlm"}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

# Where an extra's packages may be imported.
EXTRA_ROOMS = {
    "bench": "vlm/bench/",
    "cuda": "llm/backend/cuda/",
    "docling": "vlm/caption/views/doctags.py",
    "plot": "vlm/plan/plots.py",
    "trace": "vlm/api/observe/tracing.py",
}

# Declared and not imported by the product: why.
NOT_IMPORTED = {
    "open-clip-torch": "the towers that it names, and its weights' layout",
    "packaging": "kombu's Redis transport imports it without asking for it",
    "num2words": "transformers' SmolVLM processor, the opponent of benchmarks, imports it",
    "torchvision": "transformers' image processors, the opponent of benchmarks, import it",
    "matplotlib": "train: its fonts",
}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements} - {"vlm-serve"}


CORE = names(PROJECT["project"]["dependencies"])


@cache
def distributions() -> dict[str, set[str]]:
    """Top-level module -> the distributions that hold it; pillow-simd goes by the name it stands for."""
    found = metadata.packages_distributions()
    return {
        module: {canonicalize_name(name).replace("pillow-simd", "pillow") for name in owners}
        for module, owners in found.items()
    }


@cache
def imports(path: Path) -> frozenset[str]:
    """Top-level modules that a file imports anywhere, but for those of Python and its own folder."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    beside = {other.stem for other in path.parent.glob("*.py")}
    return frozenset(found - sys.stdlib_module_names - OURS - beside)


def sources() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def owners(module: str) -> set[str]:
    """A module that is not installed here is looked for under its own name."""
    return distributions().get(module) or {canonicalize_name(module)}


def undeclared(path: Path, declared: set[str]) -> set[str]:
    return {module for module in imports(path) if not owners(module) & declared}


def test_what_is_imported_is_declared() -> None:
    wrong = {}
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        extra = {name for key, room in EXTRA_ROOMS.items() if place.startswith(room) for name in EXTRAS[key]}
        if missing := undeclared(path, CORE | names(sorted(extra))):
            wrong[place] = missing
    assert not wrong, f"declare in pyproject.toml: {wrong}"


def test_what_tests_import_is_declared() -> None:
    declared = CORE.union(*(names(lines) for lines in EXTRAS.values()))
    wrong = {
        path.name: missing
        for path in sorted((ROOT / "tests").glob("*.py"))
        if (missing := undeclared(path, declared))
    }
    assert not wrong, f"declare under dev in pyproject.toml: {wrong}"


def test_scripts_need_nothing_but_python() -> None:
    """They run before there is an environment."""
    for path in (*(ROOT / "scripts").glob("*.py"), *(ROOT / "packaging").glob("*.py")):
        assert not imports(path), f"{path.name} imports {set(imports(path))}"


def test_what_is_declared_is_used() -> None:
    modules = frozenset().union(*map(imports, sources()))
    used = {name for module in modules for name in owners(module)}
    declared = CORE.union(*(names(lines) for extra, lines in EXTRAS.items() if extra != "dev"))
    assert declared - used - NOT_IMPORTED.keys() == set()
    assert NOT_IMPORTED.keys() <= declared


def test_the_missions_packages_are_required() -> None:
    assert {"torch", "transformers", "open-clip-torch", "celery", "redis", "pillow"} <= CORE


def test_installed_versions_are_within_the_declared_ranges() -> None:
    """Constraints that a range excludes could never be installed."""
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    for line in (*PROJECT["project"]["dependencies"], *(x for lines in EXTRAS.values() for x in lines)):
        wanted = Requirement(line)
        if version := versions.get(canonicalize_name(wanted.name)):
            assert wanted.specifier.contains(version), f"constraints.txt has {version} for {line}"


@pytest.mark.parametrize(
    ("extra", "what", "modules"),
    [
        (extra, what, modules)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
        for extra, what, *modules in [[arg.value for arg in node.args if isinstance(arg, ast.Constant)]]
    ],
)
def test_an_extra_brings_what_is_asked_of_it(
    extra: str, what: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        assert distributions()[module] & names(EXTRAS[extra]), f"[{extra}] lacks {module}"
    require(extra, what, *modules)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError) as error:
        require(extra, what, *modules)
    assert str(error.value) == (
        f"{what} needs {' and '.join(modules)}, not installed here: pip install 'vlm-serve[{extra}]'"
    )


@pytest.mark.parametrize(
    ("hidden", "command", "extra"),
    [
        ("matplotlib", ["plan", "kv", "--plot", "FOLDER/a.png"], "plot"),
        ("num2words", ["bench", "plan", "--quick"], "bench"),
    ],
)
def test_a_command_without_its_extra_ends_in_one_clear_line(
    hidden: str, command: list[str], extra: str, tmp_path: Path
) -> None:
    words = [word.replace("FOLDER", str(tmp_path)) for word in command]
    code = (
        f"import sys; sys.modules[{hidden!r}] = None; sys.argv[1:] = {words!r}\n"
        "from vlm.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"pip install 'vlm-serve[{extra}]'" in done.stderr and hidden in done.stderr


def test_without_the_extras_every_other_command_starts() -> None:
    hidden = ("matplotlib", "num2words", "torchvision", "opentelemetry")
    # FastAPI may need opentelemetry itself; it is then no matter of ours
    needed = {Requirement(line).name for line in metadata.requires("fastapi") or () if "extra" not in line}
    hidden = tuple(name for name in hidden if f"{name}-api" not in needed)
    code = (
        f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n"
        "import vlm.api.server, vlm.caption.caption_job, vlm.build\n"
        "import vlm.train.cli, vlm.plan.cli, vlm.bench.cli\n"
        "sys.argv[1:] = ['plan', 'kv']\nfrom vlm.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- private parts of other packages ----

# (distribution, object, parameters as we override or call it) and the file of ours that relies on it.
PRIVATE = [
    ("uvicorn", "uvicorn.protocols.http.h11_impl:H11Protocol.connection_made", "self transport"),
    ("uvicorn", "uvicorn.protocols.http.h11_impl:H11Protocol.data_received", "self data"),
    ("uvicorn", "uvicorn.protocols.http.h11_impl:H11Protocol.connection_lost", "self exc"),
    ("uvicorn", "uvicorn.protocols.http.h11_impl:H11Protocol.on_response_complete", "self"),
    ("uvicorn", "uvicorn.protocols.http.h11_impl:H11Protocol.send_400_response", "self msg"),
    ("uvicorn", "uvicorn:Server.serve", "self sockets"),
    ("uvicorn", "uvicorn:Server.startup", "self sockets"),
    ("uvicorn", "uvicorn:Server.handle_exit", "self sig frame"),
    ("kombu", "kombu.transport:TRANSPORT_ALIASES", None),
    ("kombu", "kombu.transport.redis:QoS.append", "self message delivery_tag"),
    ("kombu", "kombu.transport.redis:QoS.ack", "self delivery_tag"),
    ("kombu", "kombu.transport.virtual:QoS.append", "self message delivery_tag"),
    ("kombu", "kombu.transport.virtual:QoS.ack", "self delivery_tag"),
    ("kombu", "kombu.transport.redis:Channel._connparams", "self asynchronous"),
    (
        "kombu",
        "kombu.transport.redis:Channel._do_restore_message",
        "self payload exchange routing_key pipe leftmost",
    ),
    ("kombu", "kombu.transport.redis:Channel._lookup", "self exchange routing_key default"),
    ("kombu", "kombu.transport.redis:Channel._q_for_pri", "self queue pri"),
    ("kombu", "kombu.transport.redis:Channel.priority_steps", None),
    ("kombu", "kombu.transport.redis:Transport.Channel", None),
    ("pillow", "PIL.JpegImagePlugin:JpegImageFile._read_dpi_from_exif", "self"),
]


@pytest.mark.parametrize(("package", "place", "parameters"), PRIVATE, ids=[row[1] for row in PRIVATE])
def test_private_parts_are_where_we_take_them_to_be(package: str, place: str, parameters: str | None) -> None:
    module, _, path = place.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"{package} moved {place}"
        found = getattr(found, name)
    if parameters is not None:
        assert " ".join(inspect.signature(found).parameters) == parameters, f"{package} changed {place}"


def test_a_connection_of_uvicorn_holds_what_ours_reads() -> None:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
    from uvicorn.server import ServerState

    config = uvicorn.Config(lambda: None, log_config=None)
    config.load()
    with asyncio.Runner() as runner:
        protocol = H11Protocol(config, ServerState(), {}, runner.get_loop())
    missing = {"cycle", "conn", "loop", "transport"} - vars(protocol).keys()
    assert not missing, f"uvicorn moved H11Protocol's {missing}"
    assert "response_complete" in inspect.getsource(RequestResponseCycle), "uvicorn moved response_complete"
    server = uvicorn.Server(config)
    missing = {"started", "should_exit", "force_exit"} - vars(server).keys()
    assert not missing, f"uvicorn moved Server's {missing}"


def test_kombu_names_a_queues_priorities_as_we_do() -> None:
    from kombu.transport.redis import Channel

    from workers.cluster.celery_app import BATCH_PRIORITY, BATCH_SUFFIX

    assert f"{Channel.sep}{BATCH_PRIORITY}" == BATCH_SUFFIX, "kombu changed the names of its lists"
    assert Channel.priority_steps == [0, 3, 6, BATCH_PRIORITY], "kombu changed its priorities"


def test_packages_whose_private_parts_are_used_have_an_upper_bound() -> None:
    by_name = {Requirement(line).name: Requirement(line) for line in PROJECT["project"]["dependencies"]}
    for package in sorted({row[0] for row in PRIVATE}):
        assert re.search(r"<\d", str(by_name[package].specifier)), f"{package} needs an upper bound"


def test_overrides_of_ours_are_in_the_table() -> None:
    """A method of ours that replaces an underscored one of another package is listed above."""
    listed = {place.rpartition(".")[2] for _, place, _ in PRIVATE}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            functions = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            for name in functions:
                if not name.startswith("_") or name.endswith("__"):
                    continue
                cls = getattr(import_module(module_of(path)), node.name)
                for base in cls.__mro__[1:]:
                    if name in vars(base) and base.__module__.partition(".")[0] not in OURS:
                        assert name in listed, f"{cls.__name__}.{name} overrides {base.__module__}'s"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
