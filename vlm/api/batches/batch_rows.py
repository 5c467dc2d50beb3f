"""Rows of a batch: reading its input, checking it, and the lines of its output."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm.api.batches.batch_store import LineError
from vlm.requests.durable import DurableLog
from vlm.requests.errors import error_body
from vlm.requests.lines import BadLine, BatchLine, iterate_lines, parse_line

MAX_ROWS = 50_000
MAX_REPORTED_ERRORS = 100
EXPIRED = ("batch_expired", "This request was not run before the batch's completion window ended.")


@dataclass(frozen=True, slots=True)
class RowResult:
    """An answer (status 200) or an error body, as the endpoint itself would have sent it."""

    status: int
    body: dict[str, Any]
    request_id: str

    @property
    def is_answer(self) -> bool:
        return self.status == 200


def error_result(status: int, code: str, message: str, param: str | None = None) -> RowResult:
    return RowResult(status, error_body(status, code, message, param), new_request_id())


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def validate(path: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """(number of rows, what is wrong with the file). A body that can't be run is that row's error, not the
    file's. Blocking."""
    seen: set[str] = set()
    errors: list[LineError] = []
    total = 0
    for number, line in enumerate(iterate_lines(str(path)), 1):
        total = number
        if number > MAX_ROWS:
            return total, [LineError("too_many_lines", f"A batch has at most {MAX_ROWS} lines.", None)]
        try:
            custom_id = parse_line(line, endpoint).custom_id
            if custom_id in seen:
                errors.append(
                    LineError("duplicate_custom_id", "The custom_id was used before.", number, "custom_id")
                )
            seen.add(custom_id)
        except BadLine as error:
            errors.append(LineError(error.code, error.message, number))
        if len(errors) >= MAX_REPORTED_ERRORS:
            break
    if not total:
        errors.append(LineError("empty_file", "The input file has no lines.", None))
    return total, errors


def rows(path: Path, endpoint: str, done: set[str]) -> Iterator[BatchLine]:
    """The rows of a valid file that are not done yet. Blocking."""
    for line in iterate_lines(str(path)):
        row = parse_line(line, endpoint)
        if row.custom_id not in done:
            yield row


def encode_row(custom_id: str, result: RowResult) -> bytes:
    """An error's code and message stand beside the response as well, where clients look for either."""
    error = None if result.is_answer else {key: result.body["error"][key] for key in ("code", "message")}
    response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
    return _line(custom_id, response, error)


def encode_expired(custom_id: str) -> bytes:
    code, message = EXPIRED
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    row = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class RowFile:
    """An output or error file of a running batch. Opening it cuts off a line that a kill tore."""

    def __init__(self, path: Path) -> None:
        """Blocking. Raises OSError."""
        self.done: set[str] = set()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end = self._read_done()
            os.ftruncate(self._fd, end)
        except BaseException:
            os.close(self._fd)
            raise
        self._log = DurableLog(self._fd, end)

    def _read_done(self) -> int:
        """Where the whole lines end."""
        end = 0
        with open(self._fd, "rb", closefd=False) as lines:
            for line in lines:
                custom_id = _custom_id(line)
                if custom_id is None:
                    break
                self.done.add(custom_id)
                end += len(line)
        return end

    async def append(self, lines: bytes, custom_ids: Iterable[str]) -> None:
        """Returns when the lines are on disk; they are `done` then, also if the caller was cancelled."""
        await self._log.append(lines, lambda offset: self.done.update(custom_ids))

    async def flush(self) -> None:
        """After it `done` is what is on disk, as long as nobody appends."""
        await self._log.flush()

    async def close(self) -> None:
        await self.flush()
        os.close(self._fd)


def _custom_id(line: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["custom_id"])
    return None


def count_lines(path: Path) -> int:
    """Blocking; 0 for a file that isn't there."""
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0
