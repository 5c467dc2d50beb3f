"""Rows of the output: one per page, and the identities that make them resumable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llm.request import Timings, Usage
from vlm.caption.presets import length_prefixed_digest
from vlm.cli.file_names import as_text, percent_decoded, percent_encoded
from workers.contract.faults import OURS, TRANSIENT

Row = dict[str, Any]

RETRIED_CODES = TRANSIENT | {"unreadable_file", "page_crashed"}
"""Errors that say nothing about the page: it is tried again."""

INTERNAL = ("internal_error", "The page could not be processed because of a fault on our side.")
"""(code, message) of an unforeseen error."""

_LINE_BREAKS = "\x85\u2028\u2029"  # beside those that JSON escapes anyway
_NUMBERS, _MOST_PAGES = ("page", "page_count"), 1 << 40


@dataclass(frozen=True, slots=True)
class RowContext:
    """What all rows of a run have in common."""

    question: str  # digest
    preset: str
    model: str
    model_revision: str


@dataclass(frozen=True, slots=True)
class PageWarning:
    """What is to be known of a page beside its answer. The message is a fixed text."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page of the input. Pages count from 1; `page_count` is 0 while unknown."""

    path: str  # as the system names it: bytes that are not UTF-8 are surrogates
    page: int
    page_count: int
    file_sha256: str  # "" for a file that can't be read
    custom_id: str | None = None  # of a batch line
    warning: PageWarning | None = None

    def slot(self, question: str) -> str:
        """Where the row stands: a new row in the same slot replaces the old one."""
        return slot_of(self.path, self.page, question)

    def row_id(self, context: RowContext) -> str:
        """32 hex digits: content, path, page, question and model."""
        return length_prefixed_digest(
            self.file_sha256, self.path, str(self.page), context.question, context.model_revision
        )


def slot_of(path: str, page: int, question: str) -> str:
    return length_prefixed_digest(path, str(page), question)


def work_of(image_sha256: str, question: str, model_revision: str) -> str:
    """The identity of the model's work: equal pages, question and model give equal text."""
    return length_prefixed_digest(image_sha256, question, model_revision)


def _head(ref: PageRef, context: RowContext) -> Row:
    row: Row = {"id": ref.row_id(context), "path": ref.path, "page": ref.page, "page_count": ref.page_count}
    if ref.custom_id is not None:
        row["custom_id"] = ref.custom_id
    if ref.warning is not None:
        row["warning"] = asdict(ref.warning)
    return row


def _tail(ref: PageRef, context: RowContext, image_sha256: str) -> Row:
    return {
        "model": context.model,
        "preset": context.preset,
        "question": context.question,
        "model_revision": context.model_revision,
        "file_sha256": ref.file_sha256,
        "image_sha256": image_sha256,
    }


def page_row(
    ref: PageRef,
    context: RowContext,
    image_sha256: str,
    text: str,
    finish_reason: str,
    usage: Usage,
    timings: Timings,
) -> Row:
    answer = {
        "text": text,
        "finish_reason": finish_reason,
        "usage": asdict(usage),
        "timings": {name: round(value, 3) for name, value in asdict(timings).items()},
    }
    return {**_head(ref, context), **answer, **_tail(ref, context, image_sha256)}


def duplicate_row(ref: PageRef, context: RowContext, image_sha256: str, original: Row) -> Row:
    """A page that equals one already done: its text, without its work."""
    answer = {
        "text": original["text"],
        "finish_reason": original["finish_reason"],
        "usage": original["usage"],
        "timings": dict.fromkeys(original["timings"], 0.0),
        "duplicate_of": original["id"],
    }
    return {**_head(ref, context), **answer, **_tail(ref, context, image_sha256)}


def error_row(ref: PageRef, context: RowContext, code: str, message: str) -> Row:
    return {**_head(ref, context), "error": {"code": code, "message": message}, **_tail(ref, context, "")}


def is_settled(row: Mapping[str, Any]) -> bool:
    """Whether a later run leaves this row alone."""
    error = row.get("error")
    return not error or error["code"] not in RETRIED_CODES | OURS


def encode(row: Row) -> bytes:
    """One line of strict JSON in UTF-8, whatever the path is made of."""
    path = as_text(row["path"])
    shown = {"path": path}
    if path != row["path"]:
        shown["path_quoted"] = percent_encoded(row["path"])
    text = json.dumps(row | shown, ensure_ascii=False, separators=(",", ":"))
    for end in _LINE_BREAKS:  # many readers end a line there; JSON has them within strings alone
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "replace") + b"\n"


def decode(line: bytes) -> Row | None:
    """A row from its line, also of an output that holds raw bytes of names; None for anything else."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _is_row(row):
        return None
    quoted = row.pop("path_quoted", None)
    if isinstance(quoted, str):
        row["path"] = percent_decoded(quoted)
    return row


def _is_row(row: Row) -> bool:
    """Whether it has what resuming and the other formats rely on: people edit files."""
    names = ("id", "path", "question", "model_revision", "file_sha256", "image_sha256")
    if not all(isinstance(row.get(name), str) and _is_name(row[name]) for name in names):
        return False
    if not all(isinstance(row.get(name), int) and 0 <= row[name] < _MOST_PAGES for name in _NUMBERS):
        return False
    if "warning" in row and not _is_message(row["warning"]):
        return False
    if "text" in row:
        answer = isinstance(row["text"], str) and isinstance(row.get("finish_reason"), str)
        return answer and all(isinstance(row.get(name), dict) for name in ("usage", "timings"))
    return _is_message(row.get("error"))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("code", "message"))


def _is_name(text: str) -> bool:
    """Text, or a name of the system: no half characters that stand for no byte."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
