"""Images that are named on the command line, and errors that name them."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from preprocess.limits import ImageLimits
from preprocess.pages import is_pdf
from preprocess.types import ImageError
from vlm.cli.errors import FAILURE, CommandError

log = logging.getLogger(__name__)

STDIN = Path("-")


def check_stdin(paths: Sequence[Path]) -> None:
    """Raises `CommandError` where stdin is named twice: it can be read once."""
    if paths.count(STDIN) > 1:
        raise CommandError("'-' is stdin, which can be read once; name a file for the other image")


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def read_image(path: Path, limits: ImageLimits | None = None) -> bytes:
    """A file's bytes, or stdin's. Raises `CommandError` naming the path and what is wrong with it."""
    limits = limits or ImageLimits()
    try:
        if path == STDIN:
            data = _stdin().read(limits.max_bytes + 1)
        elif path.is_dir():
            raise CommandError(f"{path} is a folder; for many documents use: {captioning(path)}")
        else:
            with path.open("rb") as file:
                data = file.read(limits.max_bytes + 1)  # a device or a pipe has no size and may not end
    except FileNotFoundError as error:
        refuse_url(path)
        raise CommandError(f"can't read {path}: {error.strerror}") from None
    except OSError as error:
        raise CommandError(f"can't read {name_of(path)}: {error.strerror}") from None
    if len(data) > limits.max_bytes:
        raise CommandError(f"{name_of(path)} has more than {limits.max_bytes} bytes")
    return data


def refuse_url(path: Path) -> None:
    """Raises `CommandError` for a path that was written as a URL: a path keeps one of its two slashes."""
    if _URL.match(str(path)):
        url = str(path).replace(":/", "://", 1)
        raise CommandError(f"{url} is a URL, and only files are read; download it first")


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise CommandError("'-' is stdin: pipe an image into it, for example: vlm ask - QUESTION < a.png")
    return sys.stdin.buffer


def name_of(path: Path) -> str:
    return "stdin" if path == STDIN else str(path)


@contextlib.contextmanager
def naming(path: Path, data: bytes, *, reads_pdfs: bool = False) -> Iterator[None]:
    """Raises `CommandError` with the image's name for an `ImageError`, and for an unforeseen error."""
    try:
        yield
    except ImageError as error:
        if is_pdf(data) and not reads_pdfs:
            hint = f"for PDFs use 'vlm ask' or: {captioning(path)}"
            raise CommandError(f"{path} is a PDF, not an image; {hint}") from None
        raise CommandError(f"{name_of(path)}: {error.message}{_hint(path, error)}") from None
    except Exception:
        log.exception("%s", name_of(path))
        raise CommandError(
            f"{name_of(path)}: the image could not be processed because of a fault on our side", FAILURE
        ) from None


def _hint(path: Path, error: ImageError) -> str:
    named_pdf = error.code == "unsupported_image_format" and path.suffix.lower() == ".pdf"
    return " The file is named .pdf but is not a PDF." if named_pdf else ""


def captioning(path: Path) -> str:
    return f"vlm caption {path} -o out.jsonl"
