"""Rows of the output: one per page, and the identities that make them resumable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llm.request import Timings, Usage
from vlm.caption.presets import length_prefixed_digest
from workers.contract.faults import TRANSIENT

Row = dict[str, Any]

RETRIED_CODES = TRANSIENT | {"unreadable_file", "page_crashed"}
"""Errors that say nothing about the page: a later run tries again."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """What all rows of a run have in common."""

    question: str  # digest
    preset: str
    model: str
    model_revision: str


@dataclass(frozen=True, slots=True)
class PageRef:
    """A page of the input. Pages count from 1; `page_count` is 0 while unknown."""

    path: str
    page: int
    page_count: int
    file_sha256: str  # "" for a file that can't be read
    custom_id: str | None = None  # of a batch line

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
    return not error or error["code"] not in RETRIED_CODES


def encode(row: Row) -> bytes:
    return (
        json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape") + b"\n"
    )


def decode(line: bytes) -> Row | None:
    """A row from its line; None for anything else."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    texts = all(
        isinstance(row.get(name), str) for name in ("id", "path", "question", "file_sha256", "image_sha256")
    )
    answer = isinstance(row.get("text"), str) or isinstance(row.get("error"), dict)
    return (
        row if texts and answer and all(isinstance(row.get(n), int) for n in ("page", "page_count")) else None
    )
