"""What goes in and comes out, whoever answers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from preprocess.types import Detail
from vlm.caption.presets import PageQuestion, make_question


class Picture(Protocol):
    """A Pillow image, or what saves itself like one."""

    def save(self, fp: Any, format: str) -> None: ...


Image: TypeAlias = bytes | str | Path | Picture
"""An image file's bytes, its path, or a Pillow image (which is sent as PNG)."""


class VlmError(Exception):
    """A question that was refused or failed; `code` is one of docs/http.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`, and what it cost in tokens. `finish_reason` is "stop", or "length" where it was cut off."""

    text: str
    finish_reason: str
    prompt_tokens: int
    image_tokens: int
    cached_tokens: int
    completion_tokens: int

    def json(self) -> Any:
        """The text as JSON. Raises ValueError, such as for an answer that was cut off."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a question before it is asked: tokens, tiles of all images, bytes of the prompt's KV."""

    prompt_tokens: int
    image_tokens: int
    tiles: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One question. Raises ValueError for settings that can't be used."""

    images: tuple[bytes, ...]
    question: PageQuestion
    system: str | None
    detail: Detail

    @classmethod
    def of(
        cls,
        images: Image | Sequence[Image],
        question: str | None,
        *,
        preset: str | None = None,
        system: str | None = None,
        detail: Detail = "auto",
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Ask:
        asked = make_question(
            preset=preset,
            prompt=question,
            schema=None if schema is None else json.dumps(schema),
            max_tokens=max_tokens,
            order="image-first",
            seed=seed,
            temperature=temperature,
        )
        several = images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
        return cls(tuple(map(image_bytes, several)), asked, system, detail)


def image_bytes(image: Image) -> bytes:
    """Raises OSError for a path that can't be read, TypeError for what is not an image."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    if hasattr(image, "save"):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()
    raise TypeError(f"an image must be bytes, a path or a Pillow image, not {type(image).__name__}")
