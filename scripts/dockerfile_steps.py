"""Runs the steps of a Dockerfile target without Docker: its COPYs and RUNs in an empty folder.

    python scripts/dockerfile_steps.py preprocess
    python scripts/dockerfile_steps.py full --then "vlm ask vlm/samples/invoice.png 'What is the total?'"

A fresh virtual environment stands for the image's Python and the folder for its file system. Steps that need
the image's own system (apt-get, useradd) are named and left out. Ends with the target's entry point and
`--help`, or with `--then COMMAND`; as an ordinary user where it was started by root, as the image does.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = ("apt-get", "useradd", "rm -rf /var/lib")
NOBODY = 65534


def steps(target: str) -> list[tuple[str, str]]:
    """The target's instructions with those of the stages below it, in order. Raises KeyError."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif word and not word.startswith("#"):
            found[name].append((word, rest.strip()))
    return found[target]


def copy(sources: list[str], destination: Path) -> None:
    """As the last commit has them, so that nothing of the working tree comes along by accident."""
    for source in sources:
        prefix = Path(source) if (ROOT / source).is_dir() else Path(source).parent
        command = ["git", "archive", "--format=tar", "HEAD", source]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            for member in files.getmembers():
                if member.isfile():
                    member.name = str(Path(member.name).relative_to(prefix))
                    files.extract(member, destination)


def as_user() -> dict[str, object]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def play(target: str, folder: Path, then: str) -> None:
    folder.chmod(0o755)
    venv, app, home = (folder / name for name in ("venv", "app", "home"))
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    app.mkdir()
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "HOME": str(home)}
    entry: list[str] = []
    for word, rest in steps(target):
        if word == "ENV":
            env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "COPY":
            *sources, destination = rest.split()
            copy(sources, app / destination)
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word == "RUN":
            for command in rest.split(" && "):
                if command.startswith(SYSTEM):
                    print(f"left out: {command}", flush=True)
                    continue
                started = time.monotonic()
                subprocess.run(command, shell=True, cwd=app, env=env, check=True, stdout=subprocess.DEVNULL)
                print(f"{time.monotonic() - started:6.1f} s  {command}", flush=True)
    command = then or shlex.join([*entry, "--help"])
    subprocess.run(command, shell=True, cwd=app, env=env, check=True, **as_user())  # type: ignore[call-overload]
    print(f"ran: {command}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=("preprocess", "full"))
    parser.add_argument("--then", default="", help="a command to end with, where /app would be")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vlm-image-") as folder:
        play(arguments.target, Path(folder), arguments.then)


if __name__ == "__main__":
    main()
