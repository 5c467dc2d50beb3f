"""Checks a batch's input and writes down where its rows lie, so that nothing reads a row before its turn.

`python -m vlm.api.batches.batch_check INPUT ENDPOINT INDEX MAX_ROWS --fd N` is how a large file is checked:
in a process of its own, at low priority, as parsing holds the interpreter's lock that answers need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vlm.requests.lines import BadLine, parse_line, placed_lines
from workers.children.child import Child, module_command
from workers.children.frames import frames_of_parent

MAX_ROWS = 50_000
MAX_REPORTED_ERRORS = 100
LARGE_BYTES = 256 << 10  # from here on a process of its own
_ATTEMPTS = 3  # of a process that dies
_NICENESS = 10
_MODULE = "vlm.api.batches.batch_check"


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch failed validation. `line` counts from 1; None means the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A row of a checked input: its number from 0, and where it lies in the file."""

    number: int
    offset: int
    length: int  # bytes
    custom_id: str


async def check(path: Path, endpoint: str, index: Path) -> tuple[int, list[LineError]]:
    """As `validate`. Raises OSError where the index can't be written, RuntimeError where processes die."""
    if path.stat().st_size < LARGE_BYTES:
        return await asyncio.to_thread(validate, path, endpoint, index)
    for _ in range(_ATTEMPTS):
        child = Child([*module_command(_MODULE), str(path), endpoint, str(index), str(MAX_ROWS)])
        try:
            found = (await child.receive()).header
        except (EOFError, ConnectionError):
            continue
        finally:
            await child.end()
        if found["os_error"]:
            raise OSError(*found["os_error"])
        return found["total"], [LineError(**error) for error in found["errors"]]
    raise RuntimeError("the process that checks batches died")


def validate(
    path: Path, endpoint: str, index: Path | None = None, max_rows: int | None = None
) -> tuple[int, list[LineError]]:
    """(number of rows, what is wrong with the file); a file with nothing wrong gets its `index`. A body that
    can't be run is that row's error, not the file's. Blocking. Raises OSError."""
    max_rows = MAX_ROWS if max_rows is None else max_rows
    seen: set[str] = set()
    errors: list[LineError] = []
    places: list[str] = []
    total = 0
    for number, (offset, line) in enumerate(placed_lines(str(path)), 1):
        total = number
        if number > max_rows:
            return total, [LineError("too_many_lines", f"A batch may have at most {max_rows} lines.", None)]
        try:
            custom_id = parse_line(line, endpoint).custom_id
            if custom_id in seen:
                errors.append(
                    LineError("duplicate_custom_id", "The custom_id was used before.", number, "custom_id")
                )
            seen.add(custom_id)
            places.append(json.dumps([offset, len(line), custom_id]))
        except BadLine as error:
            errors.append(LineError(error.code, error.message, number))
        if len(errors) >= MAX_REPORTED_ERRORS:
            break
    if not total:
        errors.append(LineError("empty_file", "The input file has no lines.", None))
    if index is not None and not errors:
        _write(index, places)
    return total, errors


def _write(index: Path, places: list[str]) -> None:
    """All of it or nothing, also after a crash."""
    partial = index.with_suffix(".part")
    with partial.open("w", encoding="ascii") as out:
        out.writelines(f"{place}\n" for place in places)
        out.flush()
        os.fsync(out.fileno())
    partial.rename(index)


def read_places(index: Path, start: int = 0, first: int = 0, count: int = 1000) -> tuple[list[Place], int]:
    """Up to `count` rows from byte `start`, which is row number `first`; and where the next ones begin.
    Blocking."""
    with index.open("rb") as lines:
        lines.seek(start)
        found = [line for line, _ in zip(lines, range(count), strict=False)]
    places = [Place(first + number, *json.loads(line)) for number, line in enumerate(found)]
    return places, start + sum(map(len, found))


def all_places(index: Path) -> Iterator[Place]:
    """Blocking."""
    with index.open("rb") as lines:
        for number, line in enumerate(lines):
            yield Place(number, *json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("index", type=Path)
    parser.add_argument("max_rows", type=int)
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    os.nice(_NICENESS)
    total = 0
    errors: list[LineError] = []
    os_error: list[object] | None = None
    try:
        total, errors = validate(options.path, options.endpoint, options.index, options.max_rows)
    except OSError as error:
        os_error = [error.errno, error.strerror]
    with frames_of_parent(options.fd) as frames:
        frames.send({"total": total, "errors": list(map(asdict, errors)), "os_error": os_error})


if __name__ == "__main__":
    main()
