"""The final view of a journal: JSON lines are the journal itself, CSV and Markdown are made from it."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from vlm.caption.rows import Row
from vlm.requests.durable import sync_folder

Format = Literal["jsonl", "csv", "md"]

_COLUMNS = (
    "id",
    "path",
    "page",
    "page_count",
    "custom_id",
    "text",
    "finish_reason",
    "error_code",
    "error_message",
)
_USAGE = ("prompt_tokens", "image_tokens", "cached_tokens", "completion_tokens")
_LAST_COLUMNS = ("total_ms", "model", "preset", "duplicate_of")


def choose_format(output: Path, given: Format | None) -> Format:
    """What was asked for, else what the file's name says."""
    suffix = output.suffix.lower().lstrip(".")
    named: Format | None = next((name for name in get_args(Format) if name == suffix), None)
    return given or named or "jsonl"


def journal_path(output: Path, form: Format) -> Path:
    """Where rows are kept: the output itself, or a file beside a CSV or Markdown output."""
    return output if form == "jsonl" else output.with_name(output.name + ".jsonl")


def write_view(output: Path, form: Format, rows: Iterable[Row], schema: str = "") -> None:
    """Writes a new file and renames it over the old one. Raises OSError."""
    if form == "jsonl":
        return
    fresh = output.with_name(output.name + ".new")
    with open(fresh, "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
        if form == "csv":
            _write_csv(out, rows, schema_fields(schema))
        else:
            out.writelines(_markdown(rows))
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, output)
    sync_folder(output.parent)


def schema_fields(schema: str) -> list[str]:
    """The top-level properties of a JSON schema: CSV gives each a column of its own."""
    properties = json.loads(schema).get("properties", {}) if schema else {}
    return list(properties) if isinstance(properties, dict) else []


def _write_csv(out: TextIO, rows: Iterable[Row], fields: list[str]) -> None:
    names = [f"field.{name}" for name in fields]
    writer = csv.writer(out)
    writer.writerow([*_COLUMNS, *names, *_USAGE, *_LAST_COLUMNS])
    for row in rows:
        error, usage = row.get("error", {}), row.get("usage", {})
        flat = row | {"error_code": error.get("code"), "error_message": error.get("message")} | usage
        flat["total_ms"] = row.get("timings", {}).get("total_ms")
        answer = _json_object(row.get("text", "")) if fields else {}
        values = [_cell(answer.get(name)) for name in fields]
        writer.writerow(
            [flat.get(n) for n in _COLUMNS] + values + [flat.get(n) for n in (*_USAGE, *_LAST_COLUMNS)]
        )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _markdown(rows: Iterable[Row]) -> Iterator[str]:
    path = None
    for row in rows:
        if row["path"] != path:
            yield ("" if path is None else "\n") + f"## {_escape(row['path'])}\n"
            path = row["path"]
        if row["page_count"] > 1 or "custom_id" in row:
            kind, of = ("Page", f" of {row['page_count']}") if row["page_count"] else ("Line", "")
            yield f"\n### {kind} {row['page']}{of}\n"
        yield "\n" + _markdown_answer(row) + "\n"


def _markdown_answer(row: Row) -> str:
    if "error" in row:
        return f"**Failed ({row['error']['code']}):** {_escape(row['error']['message'])}"
    text = row["text"].strip()
    if _json_object(text):
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        return f"{fence}json\n{text}\n{fence}"
    return "\n".join(f"> {_escape(line)}\\" for line in text.split("\n")).removesuffix("\\")


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|&~$])", r"\\\1", text)
