"""Images that are named on the command line, and errors that name them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from preprocess.limits import ImageLimits
from preprocess.probe import NO_PDF
from preprocess.types import ImageError
from vlm.cli.errors import CommandError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def read_image(path: Path, limits: ImageLimits | None = None) -> bytes:
    """A file's bytes. Raises `CommandError` naming the path and what is wrong with it."""
    limits = limits or ImageLimits()
    try:
        if path.is_dir():
            raise CommandError(f"{path} is a folder; for many documents use: {captioning(path)}")
        with path.open("rb") as file:
            data = file.read(limits.max_bytes + 1)  # a device or a pipe has no size and may not end
    except FileNotFoundError as error:
        refuse_url(path)
        raise CommandError(f"can't read {path}: {error.strerror}") from None
    except OSError as error:
        raise CommandError(f"can't read {path}: {error.strerror}") from None
    if len(data) > limits.max_bytes:
        raise CommandError(f"{path} has more than {limits.max_bytes} bytes")
    return data


def refuse_url(path: Path) -> None:
    """Raises `CommandError` for a path that was written as a URL: a path keeps one of its two slashes."""
    if _URL.match(str(path)):
        url = str(path).replace(":/", "://", 1)
        raise CommandError(f"{url} is a URL, and only files are read; download it first")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises `CommandError` with the path for an `ImageError`; of a PDF it says what reads those."""
    try:
        yield
    except ImageError as error:
        if error.message == NO_PDF:
            raise CommandError(f"{path} is a PDF, not an image; for PDFs use: {captioning(path)}") from None
        raise CommandError(f"{path}: {error.message}") from None


def captioning(path: Path) -> str:
    return f"vlm caption {path} -o out.jsonl"
