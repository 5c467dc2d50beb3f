"""Chat + tile grids + tokens per tile -> Prompt: token ids, and the positions visual tokens take.

The text forms are those of the model family's own processor (`transformers` SmolVLM/Idefics3), so that
prompt ids are equal; the length follows from the grids alone, before a pixel is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from llm.text.chat_template import IMAGE_PLACEHOLDER, joined
from preprocess.types import TileGrid
from vlm.quoting import Quoting


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


_CACHED_CHARS = 4096  # texts up to so long have their tokens kept, those of templates among them


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
        self._quoting = Quoting((*tokenizer.special_tokens(), IMAGE_PLACEHOLDER))
        self._text_ids = lru_cache(maxsize=4096)(self._encode_text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def _ids(self, text: str, is_quoted: bool) -> Sequence[int]:
        if is_quoted:
            return self._tokenizer.encode(text, allow_special=False)
        return self._text_ids(text) if len(text) <= _CACHED_CHARS else self._encode_text(text)

    def build(self, messages: Sequence[Message]) -> Prompt:
        """Raises `RequestError` for a chat the template refuses or that is too long to look at."""
        if sum(len(p) for m in messages for p in m.content if isinstance(p, str)) > self._max_chars:
            raise RequestError(
                "context_length_exceeded", f"The text is longer than {self._max_chars} characters."
            )
        rendered = self._tokenizer.render([self._described(message) for message in messages])
        images = [part for m in messages for part in m.content if isinstance(part, ImagePart)]
        pieces = rendered.split(IMAGE_PLACEHOLDER)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                "invalid_request", "The model's chat template doesn't place each image exactly once."
            )
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for index, piece in enumerate(pieces):
            for text, is_quoted in self._quoting.split(piece):
                ids.extend(self._ids(text, is_quoted))
            if index < len(images):
                run = self._format.run(images[index].grid)
                spans.extend(
                    ImageSpan(len(ids) + start, length, images[index].key, offset)
                    for start, length, offset in run.spans
                )
                ids.extend(run.token_ids)
        return Prompt(tuple(ids), tuple(spans))

    def _described(self, message: Message) -> dict[str, object]:
        """The message as templates take it. Raises `RequestError`."""
        content = [
            {"type": "text", "text": self._quoting.quote(part)}
            if isinstance(part, str)
            else {"type": "image"}
            for part in message.content
        ]
        return {"role": message.role, "content": joined(content) if self._flat else content}
