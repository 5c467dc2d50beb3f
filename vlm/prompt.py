"""Chat + tile grids + visual token counts -> Prompt: token ids, and the positions visual tokens take.

Text first: the template's text and each image's markers are one text, as the family's own processor writes
it, tokenised between the places of visual tokens. Prompt ids are equal to the processor's, and the length
follows from the grids alone, before a pixel is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from llm.text.chat_template import joined
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
class Rows:
    """A run of placeholders for visual tokens `first` to `first + count - 1` of an image."""

    count: int
    first: int


Piece = str | Rows


class PromptTokenizer(Protocol):
    def encode(self, text: str, *, allow_special: bool = True, starts: bool = True) -> list[int]: ...

    def token_id(self, token: str) -> int: ...

    def special_tokens(self) -> Sequence[str]: ...

    @property
    def markup(self) -> frozenset[str]: ...

    def render(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool = True, placeholder: str
    ) -> str: ...


class ImageFormat(Protocol):
    """How an image of a given grid is written into the prompt."""

    @property
    def placeholder(self) -> str:
        """What chat templates write where an image stands."""
        ...

    @property
    def row_id(self) -> int:
        """Token id at the position of a visual token."""
        ...

    def pieces(self, grid: TileGrid, index: int, total: int) -> Sequence[Piece]:
        """Of image `index` of `total` in the prompt, counted from 0."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows of an image's visual tokens, named by its key."""

    rows: Rows
    key: VisualKey


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
        control = set(tokenizer.special_tokens()) - tokenizer.markup
        self._quoting = Quoting((*control, image_format.placeholder))
        self._run_ids = lru_cache(maxsize=4096)(self._encode_run)

    def build(self, messages: Sequence[Message]) -> Prompt:
        """Raises `RequestError` for a chat the template refuses or that is too long to look at."""
        if sum(len(p) for m in messages for p in m.content if isinstance(p, str)) > self._max_chars:
            raise RequestError(
                "context_length_exceeded", f"The text is longer than {self._max_chars} characters."
            )
        placeholder = self._format.placeholder
        rendered = self._tokenizer.render(
            [self._described(message) for message in messages], placeholder=placeholder
        )
        images = [part for m in messages for part in m.content if isinstance(part, ImagePart)]
        texts = rendered.split(placeholder)
        if len(texts) != len(images) + 1:
            raise RequestError(
                "invalid_request", "The model's chat template doesn't place each image exactly once."
            )
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for item in self._runs_and_places(texts, images):
            if isinstance(item, _Place):
                spans.append(ImageSpan(len(ids), item.rows.count, item.key, item.rows.first))
                ids += [self._format.row_id] * item.rows.count
            else:
                ids += self._ids(item, starts=not ids)
        return Prompt(tuple(ids), tuple(spans))

    def image_tokens(self, grid: TileGrid) -> int:
        """Prompt tokens that one more image of this grid adds, markers included."""
        pieces = self._format.pieces(grid, 0, 1)
        return sum(
            piece.count if isinstance(piece, Rows) else len(self._run_ids(piece, False)) for piece in pieces
        )

    def _runs_and_places(self, texts: list[str], images: list[ImagePart]) -> Iterator[str | _Place]:
        """Maximal texts and the places between them, in order."""
        run = texts[0]
        for index, (image, text) in enumerate(zip(images, texts[1:], strict=True)):
            for piece in self._format.pieces(image.grid, index, len(images)):
                if isinstance(piece, str):
                    run += piece
                    continue
                if run:
                    yield run
                run = ""
                yield _Place(piece, image.key)
            run += text
        if run:
            yield run

    def _ids(self, run: str, starts: bool) -> Iterator[int]:
        for text, is_quoted in self._quoting.split(run):
            if is_quoted:
                yield from self._tokenizer.encode(text, allow_special=False, starts=starts)
            else:
                encode = self._run_ids if len(text) <= _CACHED_CHARS else self._encode_run
                yield from encode(text, starts)
            starts = False

    def _encode_run(self, text: str, starts: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, starts=starts))

    def _described(self, message: Message) -> dict[str, object]:
        """The message as templates take it. Raises `RequestError`."""
        content = [
            {"type": "text", "text": self._quoting.quote(part)}
            if isinstance(part, str)
            else {"type": "image"}
            for part in message.content
        ]
        if self._flat:
            return {"role": message.role, "content": joined(content, self._format.placeholder)}
        return {"role": message.role, "content": content}
