"""Rows of a batch that runs: reading its input, and the lines of its output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core

from vlm.api.batches.batch_check import Place, all_places, read_places
from vlm.api.batches.batch_store import ERRORS, INDEX, OUTPUT
from vlm.requests.durable import DurableLog
from vlm.requests.errors import error_body
from vlm.requests.lines import BatchLine, parse_line

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


def read_row(path: Path, place: Place, endpoint: str) -> BatchLine:
    """A row of a checked input. Blocking."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return parse_line(file.read(place.length), endpoint)


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
    """An output or error file of a running batch. It is open only while it is written to: those of all
    batches would use up the process's descriptors."""

    def __init__(self, log: DurableLog, done: bytearray, count: int) -> None:
        self._log = log
        self._done = done
        self.count = count  # of its rows

    async def append(self, lines: bytes, rows: Iterable[int]) -> None:
        """Returns when the lines are on disk; `rows`, by number, are done then, also if the caller was
        cancelled."""

        def written(offset: int) -> None:
            for row in rows:
                self._done[row] = 1
                self.count += 1

        await self._log.append(lines, written)

    async def flush(self) -> None:
        """After it what is done is what is on disk, as long as no row is appended."""
        await self._log.flush()


class RowBook:
    """Which rows of a batch are done, and the files that say so."""

    def __init__(self, folder: Path, total: int) -> None:
        """Reads the files and cuts off lines that a kill tore. Blocking. Raises OSError."""
        self._index = folder / INDEX
        self._done = bytearray(total)
        answered, failed = _whole_lines(folder / OUTPUT), _whole_lines(folder / ERRORS)
        for place in all_places(self._index):
            if place.custom_id in answered.custom_ids or place.custom_id in failed.custom_ids:
                self._done[place.number] = 1
        self.output, self.errors = (
            RowFile(DurableLog(path, found.end), self._done, len(found.custom_ids))
            for path, found in ((folder / OUTPUT, answered), (folder / ERRORS, failed))
        )

    async def left(self) -> AsyncIterator[list[Place]]:
        """The rows that are not done, some at a time, in their order."""
        start = number = 0
        while True:
            places, start = await asyncio.to_thread(read_places, self._index, start, number)
            if not places:
                return
            number += len(places)
            yield [place for place in places if not self._done[place.number]]

    async def flush(self) -> None:
        await self.output.flush()
        await self.errors.flush()


@dataclass(frozen=True, slots=True)
class _Found:
    custom_ids: set[str]
    end: int  # of the whole lines, bytes


def _whole_lines(path: Path) -> _Found:
    """Makes the file where there is none, and cuts it off where its whole lines end."""
    custom_ids: set[str] = set()
    end = 0
    with path.open("a+b") as lines:
        lines.seek(0)
        for line in lines:
            custom_id = _custom_id(line)
            if custom_id is None:
                break
            custom_ids.add(custom_id)
            end += len(line)
        lines.truncate(end)
    return _Found(custom_ids, end)


def _custom_id(line: bytes) -> str | None:
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(pydantic_core.from_json(line)["custom_id"])  # parses in a third of the time of `json`
    return None


def count_lines(path: Path) -> int:
    """Blocking; 0 for a file that isn't there."""
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0
