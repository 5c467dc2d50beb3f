"""What to caption: files, folders, globs, list files and batch JSONL, one after another in natural order.

Only names are looked at here. Memory holds one folder's names at a time, however many there are in all.
"""

from __future__ import annotations

import codecs
import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from stat import S_ISREG

from vlm.cli.errors import CommandError

READABLE = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".dib", ".pdf")
)
UNREADABLE = frozenset((".heic", ".heif", ".avif", ".svg", ".ico", ".jp2"))
"""Images of formats that aren't accepted: in a folder each gets an error row rather than silence."""

_LIST_BYTES = 1 << 20  # of a list file at a time
_MOST_VISITS = 16  # of one folder over links, which may lead to it over more ways than can be counted


class InputError(CommandError):
    """An argument that names nothing that can be captioned."""


@dataclass(frozen=True, slots=True)
class InputSource:
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
        if argument == "-":
            raise InputError("documents are not read from stdin; for one image use: vlm ask - QUESTION")
        if _is_list(argument):
            _check_list(argument[1:])
        elif not os.path.exists(argument) and not _matches(argument):
            kind = "matches nothing" if glob.has_magic(argument) else "does not exist"
            raise InputError(f"{argument} {kind}")


def _is_list(argument: str) -> bool:
    return argument.startswith("@") and not os.path.lexists(argument)


def _check_list(path: str) -> None:
    """It is read twice: to count, and to caption."""
    try:
        if S_ISREG(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        raise InputError(f"the list file {path} does not exist") from None
    raise InputError(f"the list file {path} is a folder, a pipe or a device; it must be a regular file")


def _matches(argument: str) -> bool:
    return glob.has_magic(argument) and next(glob.iglob(argument, recursive=True), None) is not None


def find_sources(
    arguments: Sequence[str],
    skipped: Skipped | None = None,
    outputs: Collection[str] = (),
    *,
    ordered: bool = True,
) -> Iterator[InputSource]:
    """Files in the arguments' order. A file that is named twice comes twice; its rows are written once.

    outputs: of this run; where they are found among the inputs they are not documents. ordered: for a large
    folder natural order costs time and memory, which a mere count has no use for.
    """
    skipped = skipped if skipped is not None else Skipped()
    names = {os.path.basename(output) for output in outputs}
    for source in _find(arguments, _Walker(skipped, ordered)):
        if os.path.basename(source.path) in names and os.path.realpath(source.path) in outputs:
            skipped.add(source.path)
        else:
            yield source


def _find(arguments: Sequence[str], walker: _Walker) -> Iterator[InputSource]:
    for argument in arguments:
        if _is_list(argument):
            for name in _listed(argument[1:]):
                yield from _expand(name, walker)
        else:
            yield from _expand(argument, walker)


def _listed(path: str) -> Iterator[str]:
    """Names of a list file, one a line, or each ended by a null byte as `find -print0` writes them."""
    with open(path, "rb") as file:
        rest = file.read(_LIST_BYTES).removeprefix(codecs.BOM_UTF8)
        end = b"\0" if b"\0" in rest else b"\n"
        while rest:
            *names, rest = rest.split(end)
            more = file.read(_LIST_BYTES)
            if not more:
                names, rest = [*names, rest], b""
            rest += more
            for name in names:
                listed = os.fsdecode(name.removesuffix(b"\r") if end == b"\n" else name)
                if listed.strip():
                    yield listed if os.path.lexists(listed) else listed.strip()


def _expand(argument: str, walker: _Walker) -> Iterator[InputSource]:
    path = os.path.normpath(argument)
    if os.path.isdir(path):
        yield from walker.walk(path)
    elif glob.has_magic(argument) and not os.path.lexists(path):
        for found in sorted(glob.iglob(argument, recursive=True), key=natural_key):
            if os.path.isdir(found):
                if "**" not in argument:  # "**" names the folders' content by itself
                    yield from walker.walk(os.path.normpath(found))
            else:
                yield _source(os.path.normpath(found))
    else:
        yield _source(path)


def _source(path: str) -> InputSource:
    return InputSource(path, is_batch=path.lower().endswith(".jsonl"))


@dataclass(slots=True)
class _Folder:
    identity: tuple[int, int]  # device, inode
    is_linked: bool  # it or a folder above it was reached over a link
    entries: Iterator[os.DirEntry[str]]


class _Walker:
    """Goes through folders without recursion: they may lie deeper than Python's stack."""

    def __init__(self, skipped: Skipped, ordered: bool) -> None:
        self._skipped = skipped
        self._ordered = ordered
        self._above: list[_Folder] = []
        self._visits: Counter[tuple[int, int]] = Counter()  # of folders that are reached over links

    def walk(self, path: str) -> Iterator[InputSource]:
        """Files and folders together in natural order; hidden ones left out, loops of links cut."""
        yield from self._enter(path, is_linked=False)
        while self._above:
            here = self._above[-1]
            entry = next(here.entries, None)
            if entry is None:
                self._above.pop()
            elif _is_folder(entry):
                yield from self._enter(entry.path, here.is_linked or entry.is_symlink())
            elif os.path.splitext(entry.name)[1].lower() in READABLE | UNREADABLE:
                yield InputSource(entry.path)
            else:
                self._skipped.add(entry.path)

    def _enter(self, path: str, is_linked: bool) -> Iterator[InputSource]:
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if self._is_cut(identity, is_linked):
                return
            with os.scandir(path) as found:
                entries = [entry for entry in found if not entry.name.startswith(".")]
        except OSError:
            yield InputSource(path)  # becomes an error row
            return
        if self._ordered:
            entries.sort(key=_entry_key)
        self._above.append(_Folder(identity, is_linked, iter(entries)))

    def _is_cut(self, identity: tuple[int, int], is_linked: bool) -> bool:
        if is_linked:
            self._visits[identity] += 1
            if self._visits[identity] > _MOST_VISITS:
                return True
        return identity in (upper.identity for upper in self._above)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link whose target can't be looked at
        return False


def _entry_key(entry: os.DirEntry[str]) -> tuple[tuple[int, int, str], ...]:
    return natural_key(entry.name)
