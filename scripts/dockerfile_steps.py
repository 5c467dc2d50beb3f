"""Runs the steps of a Dockerfile target without Docker, in empty folders that stand for its file systems.

    python scripts/dockerfile_steps.py preprocess
    python scripts/dockerfile_steps.py full --then "vlm doctor --quick" --arg VLM_TORCH_INDEX=URL
    python scripts/dockerfile_steps.py full --keep /tmp/image      # a second run repeats what an edit changed

Only stages that the target needs run. Steps that need the image's own system (apt-get, useradd) are named and
left out; a stage that installs no compiler finds none on its PATH. A step runs again where Docker would build
its layer again: its text, a file it copies or a layer below it is another one. Ends with the target's entry
point and `--help`, or with `--then COMMAND`; as an ordinary user where it was started by root.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = ("apt-get", "useradd", "rm -rf /var/lib")
COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|cpp|ld|as)([.-].*)?")
NOBODY = 65534

Read = Callable[[Path], bytes]


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Layer:
    """One step of a stage; equal keys are layers that Docker takes from its cache."""

    stage: str
    word: str
    rest: str
    key: str


def stages(text: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(name, base)
        elif word:
            found[list(found)[-1]].steps.append((word, rest.strip()))
    return found


def copied(rest: str) -> tuple[str, list[str], str]:
    """(stage or "", sources, destination) of a COPY."""
    *sources, destination = rest.split()
    origin = sources.pop(0).removeprefix("--from=") if sources[0].startswith("--from=") else ""
    return origin, sources, destination


def tracked(source: str) -> list[Path]:
    """Files of the working tree that git knows, relative to the root: a file, a folder or a pattern."""
    names = glob.glob(source, root_dir=ROOT)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]
    if not paths:
        raise FileNotFoundError(f"COPY {source}: nothing there")
    return sorted(paths)


def read_tree(path: Path) -> bytes:
    return (ROOT / path).read_bytes()


def layers(text: str, target: str, read: Read = read_tree) -> list[Layer]:
    """Every step that the target needs, stages before those that use them. Raises KeyError."""
    known = stages(text)
    done: dict[str, str] = {}  # stage -> key of its last layer
    found: list[Layer] = []

    def visit(name: str) -> None:
        if name in done:
            return
        stage = known[name]
        if stage.base in known:
            visit(stage.base)
        key = done.get(stage.base, stage.base)
        for word, rest in stage.steps:
            key = hashlib.sha256("\0".join((key, word, rest)).encode()).hexdigest()
            if word == "COPY":
                origin, sources, _ = copied(rest)
                if origin:
                    visit(origin)
                    key = hashlib.sha256((key + done[origin]).encode()).hexdigest()
                else:
                    for path in (path for source in sources for path in tracked(source)):
                        content = hashlib.sha256(read(path)).hexdigest()
                        key = hashlib.sha256(f"{key}{path}{content}".encode()).hexdigest()
            found.append(Layer(name, word, rest, key))
        done[name] = key

    visit(target)
    return found


def has_compiler(known: dict[str, Stage], name: str) -> bool:
    stage = known.get(name)
    return stage is not None and (
        any("apt-get install" in rest and "g++" in rest for _, rest in stage.steps)
        or has_compiler(known, stage.base)
    )


class Folder:
    """Where a target's steps run. A path outside a stage's working folder is one for all stages: /venv, which
    scripts name by its place, is handed on from stage to stage by staying there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        self.home = root / "home"
        self.home.mkdir(exist_ok=True)
        self.home.chmod(0o777)
        self._record = root / "layers.json"
        self.cached: list[str] = json.loads(self._record.read_text()) if self._record.exists() else []

    def remember(self, key: str) -> None:
        self.cached.append(key)
        self._record.write_text(json.dumps(self.cached))

    def place(self, stage: str, path: str) -> Path:
        return self.root / path.lstrip("/") if path.startswith("/") else self.workdir(stage) / path

    def workdir(self, stage: str) -> Path:
        folder = self.root / "stages" / stage
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def here(self, text: str) -> str:
        """The image's own folders, below the root."""
        return re.sub(r"(?<![\w./-])/(venv|wheel)\b", lambda found: str(self.root / found[1]), text)

    def programs(self) -> Path:
        """Of this machine's PATH, all but compilers."""
        folder = self.root / "programs"
        if not folder.exists():
            folder.mkdir()
            for part in os.environ["PATH"].split(":"):
                for program in Path(part).glob("*"):
                    if not COMPILERS.fullmatch(program.name) and not (folder / program.name).is_symlink():
                        (folder / program.name).symlink_to(program)
        return folder

    def copy(self, known: dict[str, Stage], stage: str, rest: str) -> None:
        origin, sources, destination = copied(rest)
        target = self.place(stage, destination)
        if origin:
            for source in sources:
                there = self.place(origin, re.sub(r"^/app/", "", source))
                if there.resolve() != target.resolve():
                    shutil.copytree(there, target, dirs_exist_ok=True)
            return
        for source in sources:
            single = (ROOT / source).is_dir()
            for path in tracked(source):
                inside = path.relative_to(source) if single else Path(path.name)
                to = target / inside if single or destination.endswith("/") else target
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, to)


def commands(rest: str) -> Iterator[str]:
    """A RUN's commands, without those that need the image's system."""
    for command in rest.split(" && "):
        if command.startswith(SYSTEM):
            print(f"    left out: {command}", flush=True)
        else:
            yield command


def as_user(python: Path) -> dict[str, object]:
    """Someone other than root, where this is root and others can run Python."""
    other: dict[str, object] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        if os.geteuid() == 0:
            subprocess.run([python, "-c", ""], check=True, stderr=subprocess.DEVNULL, **other)  # type: ignore[call-overload]
            return other
    except (OSError, subprocess.CalledProcessError):
        pass
    return {}


def play(target: str, folder: Folder, arguments: dict[str, str], then: str) -> None:
    known = stages((ROOT / "Dockerfile").read_text())
    seen = set(folder.cached)
    environments: dict[str, dict[str, str]] = {}
    entry: list[str] = []
    for layer in layers((ROOT / "Dockerfile").read_text(), target):
        if layer.stage not in environments:
            path = os.environ["PATH"] if has_compiler(known, layer.stage) else str(folder.programs())
            fresh = os.environ | {"PATH": path, "HOME": str(folder.home), "PYTHONPATH": ""}
            environments[layer.stage] = dict(environments.get(known[layer.stage].base, fresh))
            if known[layer.stage].base in known:
                base = folder.workdir(known[layer.stage].base)
                shutil.copytree(base, folder.workdir(layer.stage), dirs_exist_ok=True)
        env = environments[layer.stage]
        if layer.word == "ENV":
            pairs = (pair.split("=", 1) for pair in shlex.split(folder.here(layer.rest)))
            env |= {name: value.replace("$PATH", env["PATH"]) for name, value in pairs}
        elif layer.word == "ARG":
            name, _, default = layer.rest.partition("=")
            env[name] = arguments.get(name, default)
        elif layer.word == "ENTRYPOINT":
            entry = json.loads(layer.rest)
        elif layer.word in ("COPY", "RUN") and layer.key in seen:
            print(f"  cached  {layer.stage}: {layer.word} {layer.rest[:90]}", flush=True)
        elif layer.word == "COPY":
            folder.copy(known, layer.stage, layer.rest)
            folder.remember(layer.key)
        elif layer.word == "RUN":
            started = time.monotonic()
            workdir = folder.workdir(layer.stage)
            for command in commands(folder.here(layer.rest)):
                subprocess.run(command, shell=True, cwd=workdir, env=env, check=True, stdout=sys.stderr)
            print(f"{time.monotonic() - started:6.1f} s  {layer.stage}: {layer.rest[:90]}", flush=True)
            folder.remember(layer.key)
    command = then or shlex.join([*entry, "--help"])
    user = as_user(folder.root / "venv" / "bin" / "python")
    subprocess.run(command, shell=True, cwd=folder.home, env=environments[target], check=True, **user)  # type: ignore[call-overload]
    print(f"ran as {'an ordinary' if user else 'this'} user: {command}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=("preprocess", "full"))
    parser.add_argument("--then", default="", help="a command to end with")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a build argument")
    parser.add_argument("--keep", type=Path, help="a folder to run in, and to run in again")
    given = parser.parse_args()
    arguments = dict(pair.split("=", 1) for pair in given.arg)
    if given.keep:
        play(given.target, Folder(given.keep.resolve()), arguments, given.then)
        return
    with tempfile.TemporaryDirectory(prefix="vlm-image-") as folder:
        play(given.target, Folder(Path(folder)), arguments, given.then)


if __name__ == "__main__":
    main()
