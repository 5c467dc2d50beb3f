"""What to caption: files, folders, globs, list files and batch JSONL, one after another in natural order.

Only names are looked at here. Memory holds one folder's names at a time, however many there are in all.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

READABLE = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".dib", ".pdf")
)
UNREADABLE = frozenset((".heic", ".heif", ".avif", ".svg", ".ico", ".jp2"))
"""Images of formats that aren't accepted: in a folder each gets an error row rather than silence."""


class InputError(ValueError):
    """An argument that names nothing that can be captioned; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file to caption. `path` is what rows show: the argument's own form, normalised."""

    path: str
    is_batch: bool = False  # OpenAI batch JSONL: one row per line


@dataclass(slots=True)
class Skipped:
    """Files in searched folders that are no documents."""

    num_files: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, path: str) -> None:
        self.num_files += 1
        if len(self.examples) < 3:
            self.examples.append(path)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "page 10" behind "page 9"."""
    parts = re.split(r"([0-9]+)", name)
    numbers = [(0, int(part), "") if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part]
    return (*numbers, (2, 0, name))


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises `InputError` for an argument that leads nowhere, before anything heavy is loaded."""
    if not arguments:
        raise InputError(
            "give files, folders, globs or @list.txt, for example: vlm caption scans/ -o out.jsonl"
        )
    for argument in arguments:
        path = Path(argument)
        if argument.startswith("@") and not os.path.lexists(argument):
            if not Path(argument[1:]).is_file():
                raise InputError(f"there is no list file {argument[1:]}")
        elif not path.exists() and not _matches(argument):
            kind = "matches nothing" if glob.has_magic(argument) else "does not exist"
            raise InputError(f"{argument} {kind}")


def _matches(argument: str) -> bool:
    return glob.has_magic(argument) and next(glob.iglob(argument, recursive=True), None) is not None


def find_sources(arguments: Sequence[str], skipped: Skipped | None = None) -> Iterator[Source]:
    """Files in the arguments' order. A file that is named twice comes twice; its rows are written once."""
    skipped = skipped if skipped is not None else Skipped()
    for argument in arguments:
        if argument.startswith("@") and not os.path.lexists(argument):
            with open(argument[1:], encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    if line.strip():
                        yield from _expand(line.strip(), skipped)
        else:
            yield from _expand(argument, skipped)


def _expand(argument: str, skipped: Skipped) -> Iterator[Source]:
    path = os.path.normpath(argument)
    if os.path.isdir(path):
        yield from _walk(path, skipped, ())
    elif glob.has_magic(argument) and not os.path.lexists(path):
        for found in sorted(glob.iglob(argument, recursive=True), key=natural_key):
            if os.path.isdir(found):
                if "**" not in argument:  # "**" names the folders' content by itself
                    yield from _walk(os.path.normpath(found), skipped, ())
            else:
                yield _source(os.path.normpath(found))
    else:
        yield _source(path)


def _source(path: str) -> Source:
    return Source(path, is_batch=path.lower().endswith(".jsonl"))


def _walk(folder: str, skipped: Skipped, above: tuple[tuple[int, int], ...]) -> Iterator[Source]:
    """Files and folders together in natural order; hidden ones left out, loops of links cut."""
    try:
        status = os.stat(folder)
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=_entry_key)
    except OSError:
        yield Source(folder)  # becomes an error row
        return
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, skipped, (*above, here))
        elif os.path.splitext(entry.name)[1].lower() in READABLE | UNREADABLE:
            yield Source(entry.path)
        else:
            skipped.add(entry.path)


def _entry_key(entry: os.DirEntry[str]) -> tuple[tuple[int, int, str], ...]:
    return natural_key(entry.name)
