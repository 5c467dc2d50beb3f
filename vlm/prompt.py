"""Chat + tile grids + tokens per tile -> Prompt: token ids, and the positions visual tokens take.

The text forms are those of the model family's own processor (`transformers` SmolVLM/Idefics3), so that
prompt ids are equal; the length follows from the grids alone, before a pixel is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from preprocess.types import TileGrid

PLACEHOLDER = "<image>"
"""What chat templates of the family emit for an image part."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message: its grid fixes the token count, its key names its visual tokens."""

    grid: TileGrid
    key: VisualKey


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: tuple[str | ImagePart, ...]


@dataclass(frozen=True, slots=True)
class TileRun:
    """Tokens of one image before its positions in the prompt are known."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]  # (start, length, first row of the image's visual tokens)


class PromptTokenizer(Protocol):
    def encode(self, text: str, *, allow_special: bool = True) -> list[int]: ...

    def token_id(self, token: str) -> int: ...

    def special_tokens(self) -> Sequence[str]: ...

    def render(self, messages: list[dict[str, object]], *, add_generation_prompt: bool = True) -> str: ...


class ImageFormat(Protocol):
    """How an image of a given grid is written into the prompt."""

    def run(self, grid: TileGrid) -> TileRun: ...


class PromptBuilder:
    """Renders a chat and expands its images. Special tokens that a user types stay plain text.

    `flat`: the chat template takes each message's content as one string, as plain decoders' templates do.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        image_format: ImageFormat,
        max_chars: int = 1_000_000,
        flat: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = image_format
        self._max_chars = max_chars
        self._flat = flat
        self._specials = sorted({*tokenizer.special_tokens(), PLACEHOLDER}, key=len, reverse=True)
        self._text_ids = lru_cache(maxsize=4096)(self._encode_text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def build(self, messages: Sequence[Message]) -> Prompt:
        """Raises `RequestError` for a chat the template refuses or that is too long to look at."""
        if sum(len(p) for m in messages for p in m.content if isinstance(p, str)) > self._max_chars:
            raise RequestError(
                "context_length_exceeded", f"The text is longer than {self._max_chars} characters."
            )
        quoted = _Quoted(self._specials)
        described = [_template_message(m, quoted) for m in messages]
        rendered = self._tokenizer.render([_flattened(m) for m in described] if self._flat else described)
        images = [part for m in messages for part in m.content if isinstance(part, ImagePart)]
        pieces = rendered.split(PLACEHOLDER)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                "invalid_request", "The model's chat template doesn't place each image exactly once."
            )
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for index, piece in enumerate(pieces):
            for text, is_quoted in quoted.split(piece):
                ids.extend(
                    self._tokenizer.encode(text, allow_special=False) if is_quoted else self._text_ids(text)
                )
            if index < len(images):
                run = self._format.run(images[index].grid)
                spans.extend(
                    ImageSpan(len(ids) + start, length, images[index].key, offset)
                    for start, length, offset in run.spans
                )
                ids.extend(run.token_ids)
        return Prompt(tuple(ids), tuple(spans))


class _Quoted:
    """Stand-ins from Unicode's private use area for special tokens in user text."""

    _FIRST = 0xF0000

    def __init__(self, specials: Sequence[str]) -> None:
        self._stand_ins = {token: chr(self._FIRST + i) for i, token in enumerate(specials)}
        self._originals = {stand_in: token for token, stand_in in self._stand_ins.items()}
        self._pattern = re.compile(f"([{''.join(self._originals)}])") if self._originals else re.compile("$^")

    def quote(self, text: str) -> str:
        for token, stand_in in self._stand_ins.items():
            if token in text:
                text = text.replace(token, stand_in)
        return text

    def split(self, text: str) -> list[tuple[str, bool]]:
        """(text, is a user's special token) in order; texts without stand-ins come back whole."""
        parts = self._pattern.split(text) if self._originals else [text]
        pairs = [(self._originals.get(part, part), part in self._originals) for part in parts]
        return [pair for pair in pairs if pair[0]]


def _template_message(message: Message, quoted: _Quoted) -> dict[str, Any]:
    content = [
        {"type": "text", "text": quoted.quote(part)} if isinstance(part, str) else {"type": "image"}
        for part in message.content
    ]
    return {"role": message.role, "content": content}


def _flattened(message: dict[str, Any]) -> dict[str, Any]:
    parts = [part.get("text", PLACEHOLDER) for part in message["content"]]
    return {**message, "content": "".join(parts)}
