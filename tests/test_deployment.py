"""compose.yaml and the Dockerfile: what they run exists, says what this version understands, and builds again
only what changed."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import RedisServer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts_of import ROOT, load_script

from vlm.cli.main import app

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("preprocess", "full")
PACKAGES = ("preprocess", "encoder", "llm", "workers", "vlm")
steps = load_script("scripts/dockerfile_steps.py")
STAGES = steps.stages(DOCKERFILE)


def chain(name: str) -> list[Any]:
    """A stage and those below it."""
    return [*chain(STAGES[name].base), STAGES[name]] if name in STAGES else []


def instructions(target: str, word: str) -> list[str]:
    return [rest for stage in chain(target) for other, rest in stage.steps if other == word]


# ---- compose.yaml ----


def command_line(name: str) -> tuple[list[str], dict[str, Any]]:
    """The command that a service built here runs, and its parameters as this version reads them."""
    service = SERVICES[name]
    program, *words = [
        *json.loads(instructions(service["build"]["target"], "ENTRYPOINT")[-1]),
        *service["command"],
    ]
    assert program == "vlm"
    command: Any = typer.main.get_command(app)
    path = []
    while hasattr(command, "commands"):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    return path, command.make_context(name, list(words)).params


OURS = [name for name, service in SERVICES.items() if "build" in service]


@pytest.mark.parametrize("name", OURS)
def test_commands_parse_as_this_version_does(name: str) -> None:
    path, parameters = command_line(name)
    assert parameters["broker"] == "redis://redis:6379/0"
    assert (parameters.get("remote_engine") is True) == (path == ["serve"])


def test_every_kind_of_worker_runs_beside_the_api() -> None:
    workers: Any = typer.main.get_command(app).commands["worker"]  # type: ignore[attr-defined]
    expected = {("serve",), *(("worker", kind) for kind in workers.commands)}
    assert {tuple(command_line(name)[0]) for name in OURS} == expected


def test_services_wait_for_services_that_say_when_they_are_ready() -> None:
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"} and "healthcheck" in SERVICES[other]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]


@pytest.mark.redis
def test_redis_never_evicts_a_queue_and_keeps_it(tmp_path: Path) -> None:
    import redis

    program, *options = SERVICES["redis"]["command"]
    server = RedisServer(tmp_path, [program, *options, "--maxmemory", "3mb"])
    server.start()
    try:
        client = redis.Redis(port=server.port)
        client.rpush("preprocess", "a task")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for i in range(200):
                client.set(f"blob {i}", bytes(1 << 16))
        assert client.lrange("preprocess", 0, -1) == [b"a task"]
        server.stop()
        server.start()
        assert client.lrange("preprocess", 0, -1) == [b"a task"]
    finally:
        server.stop()


def test_nothing_is_published_beyond_this_host() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


# ---- the images ----


def tool(name: str) -> str:
    """A linter of the development environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        assert name == "hadolint" and (sys.platform, platform.machine()) != ("linux", "x86_64"), (
            f"{name} is missing"
        )
        pytest.skip("hadolint ships for x86-64 Linux")
    return found


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("hadolint", ["--config", ".hadolint.yaml", "Dockerfile"]),
        (
            "yamllint",
            ["--strict", "-c", ".yamllint.yaml", "compose.yaml", ".hadolint.yaml", ".yamllint.yaml"],
        ),
    ],
)
def test_linters_find_nothing(program: str, arguments: list[str]) -> None:
    done = subprocess.run([tool(program), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def rebuilt(target: str, edited: str) -> list[str]:
    """The RUN steps that Docker repeats after an edit of a file."""

    def read(path: Path) -> bytes:
        return steps.read_tree(path) + (b"\n" if str(path) == edited else b"")

    before = {layer.key for layer in steps.layers(DOCKERFILE, target)}
    after = steps.layers(DOCKERFILE, target, read)
    return [layer.rest for layer in after if layer.word == "RUN" and layer.key not in before]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "edited",
    ["vlm/pipeline.py", "llm/engine.py", "workers/cluster/blobs.py", "preprocess/tiling.py", "README.md"],
)
def test_an_edited_source_installs_no_package_again(target: str, edited: str) -> None:
    wheel, install = rebuilt(target, edited)
    assert wheel.startswith("pip wheel") and "--no-deps" in wheel and "--no-build-isolation" in wheel
    assert install.startswith("pip install") and "--no-deps" in install


def test_an_edit_of_the_native_source_compiles_it_and_installs_no_package_again() -> None:
    compiled, *rest = rebuilt("full", "llm/backend/native_lanes.h")
    assert "native_build.py" in compiled and len(rest) == 2


def test_an_edit_of_what_is_asked_for_installs_it() -> None:
    assert any("constraints.txt" in step for step in rebuilt("full", "constraints.txt"))


@pytest.mark.parametrize("target", TARGETS)
def test_no_image_holds_a_compiler_or_headers(target: str) -> None:
    """And from the stages that do, only the environment and the wheel come along."""
    assert steps.has_compiler(STAGES, "build") and not steps.has_compiler(STAGES, target)
    assert not re.search(r"-dev\b|\bgcc\b", " ".join(instructions(target, "RUN")))
    origins = [steps.copied(rest) for rest in instructions(target, "COPY")]
    assert sorted(source for _, sources, _ in origins for source in sources) == ["/venv/", "/wheel/"]


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_a_user_that_is_not_root(target: str) -> None:
    user = instructions(target, "USER")[-1]
    assert int(user) > 0 and f"--uid {user} " in " ".join(instructions(target, "RUN"))


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    """A checkout holds gigabytes beside it."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    copies = [steps.copied(rest) for s in STAGES.values() for word, rest in s.steps if word == "COPY"]
    sources = {source.split("/")[0] for origin, names, _ in copies if not origin for source in names}
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == sources


def closure(names: list[str]) -> set[str]:
    """Distributions that a plain install of `names` brings here, pillow-simd's among them."""
    found: set[str] = set()
    wanted = [canonicalize_name(name) for name in names]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            other = Requirement(line)
            if other.marker is None or other.marker.evaluate({"extra": ""}):
                wanted.append(canonicalize_name(other.name))
    return found


def test_the_preprocess_worker_runs_with_the_packages_of_its_image() -> None:
    """Every package that the image does not install is hidden from the import system."""
    lines = load_script("packaging/requirements.py").requirements(PROJECT, "preprocess")
    installed = closure([Requirement(line).name for line in lines])
    assert not installed & {"torch", "transformers", "fastapi", "open-clip-torch", "matplotlib"}
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & (installed | {"vlm-serve"})
    }
    assert {"torch", "fastapi", "pypdfium2", "psutil"} <= hidden
    code = f"""
import sys
for name in {sorted(hidden - sys.stdlib_module_names)!r}: sys.modules[name] = None
import kombu.transport.redis, workers.cluster.celery_transport, workers.cluster.worker.preprocess_worker
from pathlib import Path
from preprocess.probe import probe
from preprocess.decode import decode
data = Path("vlm/samples/invoice.png").read_bytes()
assert decode(data).size == (probe(data).width, probe(data).height)
from vlm.cli.main import app
app(["worker", "preprocess", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--broker" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    """A file that the package data forgets is missing in the images only."""
    tree = tmp_path / "tree"
    files = [path for package in PACKAGES for path in steps.tracked(f"{package}/")]
    for path in (*files, *map(Path, ("pyproject.toml", "README.md", "LICENSE", "NOTICE"))):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tree / path)
    library = tree / "llm/backend/compiled/native-x86-64-v3.so"
    library.parent.mkdir()
    library.touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        tree,
    ]
    subprocess.run(command, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path) for path in (*files, library.relative_to(tree))} - held == set()


def test_pillow_simd_never_comes_without_the_pillow_that_reads_tiffs() -> None:
    """Wherever the shim that lets pillow-simd stand for Pillow is installed, the second Pillow is."""
    for name in ("Dockerfile", "scripts/setup_env.py"):
        text = (ROOT / name).read_text()
        assert "pillow-shim" in text and "packaging/pillow_for_tiff.py" in text, name
    assert (ROOT / "packaging/pillow_for_tiff.py").exists()


def test_the_image_that_draws_pdfs_has_fonts_for_text_that_brings_none() -> None:
    """`vlm caption` runs in `full`; of the scripts of East Asia pdfium draws nothing without a font."""
    stage = (ROOT / "Dockerfile").read_text().partition(" AS full\n")[2]
    assert {"fonts-dejavu-core", "fonts-wqy-microhei"} <= set(stage.split())
