"""compose.yaml and the Dockerfile: what they run exists, and says what this version understands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vlm.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICE_KEYS = {
    "image",
    "build",
    "command",
    "depends_on",
    "restart",
    "init",
    "volumes",
    "healthcheck",
    "ports",
    "deploy",
    "stop_grace_period",
}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, []))
        else:
            found[list(found)[-1]].append((word, rest))
    return found


def entry(service: dict[str, Any]) -> list[str]:
    """The whole command line of a service built here."""
    (point,) = [rest for word, rest in stages()[service["build"]["target"]] if word == "ENTRYPOINT"][-1:]
    return [*yaml.safe_load(point), *service["command"]]


OURS = [name for name, service in SERVICES.items() if "build" in service]


@pytest.mark.parametrize("name", SERVICES)
def test_services_use_known_keys_and_depend_on_services_that_are_there(name: str) -> None:
    service = SERVICES[name]
    assert service.keys() <= SERVICE_KEYS
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"} and "healthcheck" in SERVICES[other]
    for volume in service.get("volumes", []):
        assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_every_part_of_the_topology_is_there() -> None:
    assert {"redis", "api", "preprocess", "encode", "generate"} <= SERVICES.keys()
    assert SERVICES["generate"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", OURS)
def test_commands_parse_as_this_version_does(name: str) -> None:
    group = typer.main.get_command(app)
    program, *words = entry(SERVICES[name])
    assert program == "vlm"
    command: Any = group
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context(name, list(words))
    assert context.params["broker"] == "redis://redis:6379/0"
    assert (context.params.get("remote_engine") is True) == (name == "api")


def test_redis_never_evicts_a_queue_and_keeps_it() -> None:
    words = SERVICES["redis"]["command"]
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"
    assert words[words.index("--appendonly") + 1] == "yes"


def test_nothing_is_published_beyond_this_host() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_dockerfile_instructions_are_known_and_images_are_pinned() -> None:
    known = {"FROM", "RUN", "WORKDIR", "ENV", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} <= known
    for word, rest in instructions():
        if word == "FROM":
            base = rest.partition(" AS ")[0]
            assert base in stages() or (re.search(r":[\w.-]+$", base) and not base.endswith(":latest"))
    for service in SERVICES.values():
        assert re.search(r":[\w.-]+$", service["image"]) and not service["image"].endswith(":latest")


def test_dockerfile_copies_what_is_there_and_ends_as_a_user() -> None:
    for steps in stages().values():
        for word, rest in steps:
            if word == "COPY":
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), source
    for target in ("preprocess", "full"):
        assert [rest for word, rest in stages()[target] if word == "USER"][-1] == "vlm"


def test_the_build_context_is_what_the_dockerfile_copies() -> None:
    """A checkout holds gigabytes beside it."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    sources = {
        source.rstrip("/")
        for steps in stages().values()
        for word, rest in steps
        if word == "COPY"
        for source in rest.split()[:-1]
    }
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == sources


def test_shell_steps_stop_at_the_first_error_and_leave_no_package_lists() -> None:
    for word, rest in instructions():
        if word != "RUN":
            continue
        assert ";" not in rest and "|" not in rest  # only && between commands
        commands = [shlex.split(part) for part in rest.split("&&")]
        installs = [c for c in commands if c[:2] == ["apt-get", "install"]]
        assert all({"-y", "--no-install-recommends"} <= set(c) for c in installs)
        assert not installs or "/var/lib/apt/lists/*" in rest
        assert all("--no-cache-dir" in c for c in commands if "pip" in c)


def test_preprocess_worker_starts_with_the_packages_of_its_image() -> None:
    """Everything that the Dockerfile does not install there is hidden from the import system."""
    (line,) = [rest for word, rest in stages()["preprocess"] if word == "RUN" and "celery" in rest]
    installed = {"numpy", "celery", "redis", "packaging", "pypdfium2", "psutil", "typer"}
    assert installed <= set(line.split())
    hidden = (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "jinja2",
        "matplotlib",
        "fastapi",
        "httpx",
    )
    assert not set(hidden) & set(line.split())
    code = (
        f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n"
        "import workers.cluster.worker.preprocess_worker\nfrom vlm.cli.main import app\n"
        "app(['worker', 'preprocess', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--broker" in done.stdout, done.stderr


def test_the_preprocess_image_never_installs_torch() -> None:
    text = " ".join(rest for word, rest in stages()["preprocess"] if word == "RUN")
    assert "torch" not in text and "--no-deps" in text


def test_the_image_that_draws_pdfs_has_fonts_for_text_that_brings_none() -> None:
    """`vlm caption` runs in `full`; of the scripts of East Asia pdfium draws nothing without a font."""
    packages = {word for kind, rest in stages()["full"] if kind == "RUN" for word in rest.split()}
    assert {"fonts-dejavu-core", "fonts-wqy-microhei"} <= packages
