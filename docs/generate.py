"""Writes the pages of docs/ that follow from the code, and the README's table of families.

    python docs/generate.py [--check]

--check writes nothing and ends with 1, naming the pages, where one is not current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by docs/generate.py; edit the code, not this page. -->\n\n"
FAMILIES = re.compile(r"(<!-- families -->\n).*?(<!-- end -->)", re.S)


def settings_page() -> str:
    from vlm.config import EngineOptions, ServeConfig

    lines = [NOTE + "# Settings\n\n"]
    lines.append(
        "`vlm serve --config FILE` reads them from a TOML file with these two tables; an option of the\n"
        "command line wins over the file. Values are checked at start, one line for each that is wrong.\n"
    )
    for table, config in (("serve", ServeConfig), ("engine", EngineOptions)):
        lines.append(f"\n## [{table}]\n\n| setting | default | accepted | meaning |\n|---|---|---|---|\n")
        comments = _comments(config)
        for field in dataclasses.fields(config):
            default = "the shipped model" if field.name == "model" else _shown(field.default)
            row = (f"`{field.name}`", default, _accepted(config, field.name), comments.get(field.name, ""))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
    return "".join(lines)


def _comments(config: type) -> dict[str, str]:
    """What is written behind each field of a dataclass in its source."""
    source = inspect.getsource(config).splitlines()
    body = ast.parse(inspect.cleandoc("\n".join(source))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            found[node.target.id] = source[node.end_lineno - 1].partition("  # ")[2]
    return found


def _accepted(config: type, name: str) -> str:
    from vlm.settings import accepted

    return accepted(config, name)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if value != "" else "empty"


def cli_page() -> str:
    import click
    import typer

    from vlm.cli.main import app

    lines = [NOTE + "# Command line\n"]
    for name, command in _commands(typer.main.get_command(app), "vlm"):
        context = click.Context(command, info_name=name, max_content_width=100, terminal_width=100)
        lines.append(f"\n## {name}\n\n```\n{command.get_help(context).strip()}\n```\n")
    return "".join(lines)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    import click

    yield name, command
    if hasattr(command, "list_commands"):
        context = click.Context(command, info_name=name)
        for sub in command.list_commands(context):
            yield from _commands(command.get_command(context, sub), f"{name} {sub}")


def metrics_page() -> str:
    from vlm.api.observe.metrics import described

    lines = [NOTE + "# Metrics\n\n`GET /metrics`, Prometheus text format.\n\n"]
    lines.append("| metric | kind | meaning |\n|---|---|---|\n")
    lines += [f"| `{name}` | {kind} | {text} |\n" for name, kind, text in described()]
    return "".join(lines)


_ENGINES = {"transformers": "`--engine transformers`", "vllm": "vLLM's own server"}


def families_table() -> str:
    from vlm.cli.models import ANY_OTHER, family_rows

    lines = [
        "| family | `model_type` | engine | checkpoints, with their sizes and licences |\n|---|---|---|---|\n"
    ]
    for row in family_rows():
        sizes = "; ".join(f"{size['repo']} ({size['params']}, {size['licence']})" for size in row["sizes"])
        types = ", ".join(row["model_types"])
        if row["title"] == ANY_OTHER:
            types, sizes = "those that `vlm families --json` lists", "in safetensors"
        engine = _ENGINES.get(row["engine"], row["engine"])
        lines.append(f"| {row['title']} | {types} | {engine} | {sizes} |\n")
    return "".join(lines)


def pages() -> dict[str, str]:
    """Path -> what it should hold."""
    os.environ["COLUMNS"] = "100"
    readme = (ROOT / "README.md").read_text()
    return {
        "docs/settings.md": settings_page(),
        "docs/cli.md": cli_page(),
        "docs/metrics.md": metrics_page(),
        "README.md": FAMILIES.sub(lambda m: m[1] + families_table() + m[2], readme),
    }


def main() -> None:
    sys.path.insert(0, str(ROOT))
    stale = [path for path, text in pages().items() if not _current(ROOT / path, text)]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not current, run docs/generate.py: {', '.join(stale)}" if stale else 0)
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
    print(f"written: {', '.join(stale) or 'nothing, all pages were current'}")


def _current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
