"""What every child process of ours is started with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent.parent)


def module_command(module: str) -> list[str]:
    """Runs one of our modules. -P: a `json.py` in the working folder is a stranger's file and no module."""
    return [sys.executable, "-P", "-m", module]


def child_environment(**variables: str) -> dict[str, str]:
    """The parent's, with our packages importable wherever the parent found them."""
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}
