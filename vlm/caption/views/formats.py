"""The final view of a journal: JSON lines are the journal itself, CSV and Markdown are made from it."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from vlm.caption.rows import Row, encode
from vlm.caption.views.doctags import is_doctags, to_markdown
from vlm.cli.file_names import as_text, one_line, percent_encoded
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
_LAST_COLUMNS = (
    "total_ms",
    "model",
    "preset",
    "duplicate_of",
    "warning_code",
    "warning_message",
    "path_quoted",
)
_SUFFIXES: dict[str, Format] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "md": "md",
    "markdown": "md",
}
_LINE_END = re.compile("\r\n|\r|\n")  # CommonMark 0.31, section 2.1


def choose_format(output: Path, given: Format | None) -> Format:
    """What was asked for, else what the file's name says. Raises ValueError where the two differ, and for a
    suffix that says nothing."""
    suffix = output.suffix.lower().lstrip(".")
    named = _SUFFIXES.get(suffix)
    if given and named and given != named:
        raise ValueError(f"{output} is named .{suffix} but --format is {given}: change one of them")
    if not given and not named and suffix:
        raise ValueError(f"{output}: .{suffix} is not a format; use .jsonl, .csv or .md, or add --format")
    return given or named or "jsonl"


def journal_path(output: Path, form: Format) -> Path:
    """Where rows are kept: the output itself, or a file beside a CSV or Markdown output."""
    return output if form == "jsonl" else output.with_name(output.name + ".jsonl")


def write_view(output: Path, form: Format, rows: Iterable[Row], schema: str = "") -> None:
    """Writes a new file and renames it over the old one. Raises OSError."""
    fresh = output.with_name(output.name + ".new")
    try:
        with open(fresh, "w", encoding="utf-8", errors="replace", newline="") as out:
            write_rows(out, form, rows, schema)
            out.flush()
            os.fsync(out.fileno())
        os.replace(fresh, output)
        sync_folder(output.parent)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def write_rows(out: TextIO, form: Format, rows: Iterable[Row], schema: str = "") -> None:
    """The whole document. Raises OSError."""
    match form:
        case "jsonl":
            out.writelines(encode(row).decode() for row in rows)
        case "csv":
            _write_csv(out, rows, schema_fields(schema))
        case "md":
            out.writelines(_markdown(rows))


def schema_fields(schema: str) -> list[str]:
    """The top-level properties of a JSON schema: CSV gives each a column of its own."""
    properties = json.loads(schema).get("properties", {}) if schema else {}
    return list(properties) if isinstance(properties, dict) else []


def _write_csv(out: TextIO, rows: Iterable[Row], fields: list[str]) -> None:
    names = [f"field.{name}" for name in fields]
    writer = csv.writer(out)
    writer.writerow([*_COLUMNS, *names, *_USAGE, *_LAST_COLUMNS])
    for row in rows:
        flat = row | row.get("usage", {})
        for part in ("error", "warning"):
            said = row.get(part, {})
            flat |= {f"{part}_code": said.get("code"), f"{part}_message": said.get("message")}
        flat["path"] = as_text(row["path"])
        if flat["path"] != row["path"]:
            flat["path_quoted"] = percent_encoded(row["path"])
        flat["total_ms"] = row.get("timings", {}).get("total_ms")
        answer = _json_object(row.get("text", "")) if fields else {}
        values = [_cell(answer.get(name)) for name in fields]
        writer.writerow(
            [flat.get(n) for n in _COLUMNS] + values + [flat.get(n) for n in (*_USAGE, *_LAST_COLUMNS)]
        )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _markdown(rows: Iterable[Row]) -> Iterator[str]:
    path = None
    for row in rows:
        if row["path"] != path:
            yield ("" if path is None else "\n") + f"## {_escape(one_line(row['path']))}\n"
            path = row["path"]
        if row["page_count"] > 1 or "custom_id" in row:
            kind, of = ("Page", f" of {row['page_count']}") if row["page_count"] else ("Line", "")
            yield f"\n### {kind} {row['page']}{of}\n"
        if "warning" in row:
            yield f"\n**Warning ({row['warning']['code']}):** {_escape(row['warning']['message'])}\n"
        yield "\n" + _markdown_answer(row) + "\n"


def _markdown_answer(row: Row) -> str:
    if "error" in row:
        return f"**Failed ({row['error']['code']}):** {_escape(row['error']['message'])}"
    text = row["text"].strip()
    if _json_object(text):
        return _fenced(text, "json")
    if is_doctags(text):
        converted = to_markdown(text)
        return "\n".join(f"> {line}" for line in _LINE_END.split(converted)) if converted else _fenced(text)
    return "\n".join(f"> {_escape(line)}\\" for line in _LINE_END.split(text)).removesuffix("\\")


def _fenced(text: str, language: str = "") -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|&~$])", r"\\\1", text)
