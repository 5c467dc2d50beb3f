"""JSON that clients sent: strict, and of bounded size once it is parsed."""

from __future__ import annotations

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
    """Refuses NaN and lone surrogates too, which nothing behind it can encode. Raises ValueError."""
    check_size(text)
    return pydantic_core.from_json(text, allow_inf_nan=False)
