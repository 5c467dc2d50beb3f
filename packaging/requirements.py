"""Prints what an image installs, from pyproject.toml: every dependency, or those of a group.

python packaging/requirements.py full
python packaging/requirements.py preprocess
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(project: dict[str, Any], image: str) -> list[str]:
    """Lines as pip reads them. Raises KeyError for an image that is neither `full` nor a group."""
    lines: list[str] = project["project"]["dependencies"]
    if image == "full":
        return lines
    by_name = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
    return [by_name[name] for name in project["dependency-groups"][image]]


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.loads(PROJECT.read_text()), sys.argv[1])))
