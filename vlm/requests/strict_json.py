"""JSON that clients sent: strict, and of bounded size once it is parsed."""

from __future__ import annotations

import codecs
from typing import Any

import pydantic_core

MAX_VALUES = 1 << 18


class TooManyValues(ValueError):
    """Three bytes of text can be seventy in memory, and are parsed with the interpreter's lock held."""


def check_size(text: bytes) -> None:
    """Commas and brackets inside strings count too: a string with so many fits no context.

    Raises TooManyValues.
    """
    if len(text) > MAX_VALUES and sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise TooManyValues(f"more than {MAX_VALUES} JSON values")


def parse(text: bytes) -> Any:
    """Refuses NaN and lone surrogates too, which nothing behind it can encode; a byte order mark is passed
    over. Raises ValueError."""
    check_size(text)
    return pydantic_core.from_json(without_mark(text), allow_inf_nan=False)


def without_mark(text: bytes) -> bytes:
    """Some editors and shells begin UTF-8 with a byte order mark."""
    return text.removeprefix(codecs.BOM_UTF8)
