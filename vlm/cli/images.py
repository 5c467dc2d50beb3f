"""Images that are named on the command line, and errors that name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from preprocess.limits import ImageLimits
from preprocess.types import ImageError
from vlm.cli.errors import CommandError


def read_image(path: Path, limits: ImageLimits | None = None) -> bytes:
    """A file's bytes. Raises `CommandError` naming the path and what is wrong with it."""
    limits = limits or ImageLimits()
    try:
        if path.is_dir():
            raise CommandError(f"{path} is a folder; for many documents use: vlm caption {path} -o out.jsonl")
        with path.open("rb") as file:
            data = file.read(limits.max_bytes + 1)  # a device or a pipe has no size and may not end
    except OSError as error:
        raise CommandError(f"can't read {path}: {error.strerror}") from None
    if len(data) > limits.max_bytes:
        raise CommandError(f"{path} has more than {limits.max_bytes} bytes")
    return data


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises `CommandError` with the path for an `ImageError`; of a PDF it says what reads those."""
    try:
        yield
    except ImageError as error:
        is_pdf = error.code == "unsupported_image_format" and path.suffix.lower() == ".pdf"
        hint = f" For PDFs use: vlm caption {path} -o out.jsonl" if is_pdf else ""
        raise CommandError(f"{path}: {error.message}{hint}") from None
