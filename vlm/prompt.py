"""Chat + tile grids + visual token counts -> Prompt: token ids, and the positions visual tokens take.

Text first: the template's text and each image's markers are one text, as the family's own processor writes
it, tokenised between the places of visual tokens. Prompt ids are equal to the processor's, and the length
follows from the grids alone, before a pixel is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from llm.text.chat_template import joined
from preprocess.types import TileGrid
from vlm.quoting import Quoting
from vlm.tools.calls import Call, Tool
from vlm.tools.forms import CallForm, form_of
from vlm.tools.spelling import spelled_out


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message: its grid fixes the token count, its key names its visual tokens."""

    grid: TileGrid
    key: VisualKey


@dataclass(frozen=True, slots=True)
class Message:
    """calls: of an answer; call_id and name: of the call that a message of role "tool" answers."""

    role: str
    content: tuple[str | ImagePart, ...]
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a chat is written, besides its messages.

    variables: what the chat template may read, such as `enable_thinking`; begins_answer: the prompt ends
    where an answer begins; continues_last: it ends where the last message's text does.
    """

    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    begins_answer: bool = True
    continues_last: bool = False


PLAIN = Rendering()


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of placeholders for visual tokens `first` to `first + count - 1` of an image."""

    count: int
    first: int
    shape: tuple[int, int] | None = None  # (rows, columns) of a whole image, where rope tells them apart


Piece = str | Rows


class PromptTokenizer(Protocol):
    def encode(self, text: str, *, allow_special: bool = True, starts: bool = True) -> list[int]: ...

    def whole(self, text: str) -> list[int]: ...

    def token_id(self, token: str) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def special_tokens(self) -> Sequence[str]: ...

    @property
    def markup(self) -> frozenset[str]: ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        placeholder: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
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

    @cached_property
    def call_form(self) -> CallForm:
        """How the model writes tool calls."""
        return form_of(self._tokenizer)

    def build(self, messages: Sequence[Message], rendering: Rendering = PLAIN) -> Prompt:
        """Raises `RequestError` for a chat the template refuses or that is too long to look at."""
        self.check_length(messages, rendering)
        placeholder = self._format.placeholder
        rendered = self._rendered(messages, rendering)
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
                rows = item.rows
                spans.append(ImageSpan(len(ids), rows.count, item.key, rows.first, rows.shape))
                ids += [self._format.row_id] * item.rows.count
            else:
                ids += self._ids(item, starts=not ids)
        return Prompt(tuple(ids), tuple(spans))

    def plain(self, text: str | Sequence[int]) -> Prompt:
        """A text as it is, special tokens and all, or its tokens. Raises `RequestError`."""
        if isinstance(text, str):
            text = self._tokenizer.whole(text)
        if not text:
            raise RequestError("invalid_value", "The prompt has no tokens.")
        if any(token >= self._tokenizer.vocab_size for token in text):
            raise RequestError("invalid_value", "A token id is outside the vocabulary.")
        return Prompt(tuple(text))

    def check_length(self, messages: Sequence[Message], rendering: Rendering) -> None:
        """Raises `RequestError` for what is too long to look at."""
        if _num_chars(messages, rendering) > self._max_chars:
            raise RequestError(
                "context_length_exceeded", f"The text is longer than {self._max_chars} characters."
            )

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

    def _rendered(self, messages: Sequence[Message], rendering: Rendering) -> str:
        described = [self._described(message) for message in messages]
        tools = [self._quoted(tool.described()) for tool in rendering.tools]
        uses_tools = bool(tools) or any(m.calls or m.role == "tool" for m in messages)
        if uses_tools and not self.call_form.is_native:
            described, tools = spelled_out(described, tools, self.call_form), []
        placeholder = self._format.placeholder
        if self._flat:
            described = [{**item, "content": joined(item["content"], placeholder)} for item in described]
        rendered = self._tokenizer.render(
            described,
            add_generation_prompt=rendering.begins_answer and not rendering.continues_last,
            placeholder=placeholder,
            tools=tools or None,
            variables=self._quoted(rendering.variables),
        )
        return _until(rendered, described[-1], placeholder) if rendering.continues_last else rendered

    def _described(self, message: Message) -> dict[str, Any]:
        """The message as templates take it. Raises `RequestError`."""
        content = [
            {"type": "text", "text": self._quoting.quote(part)}
            if isinstance(part, str)
            else {"type": "image"}
            for part in message.content
        ]
        described: dict[str, Any] = {"role": message.role, "content": content}
        if message.calls:
            described["tool_calls"] = [self._quoted(self.call_form.described(call)) for call in message.calls]
        if message.call_id is not None:
            described["tool_call_id"] = self.call_form.call_id(message.call_id)
        if message.name is not None:
            described["name"] = self._quoting.quote(message.name)
        return described

    def _quoted(self, value: Any) -> Any:
        """A JSON value, each string of it quoted."""
        if isinstance(value, str):
            return self._quoting.quote(value)
        if isinstance(value, Mapping):
            return {self._quoting.quote(key): self._quoted(inner) for key, inner in value.items()}
        return [self._quoted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _num_chars(messages: Sequence[Message], rendering: Rendering) -> int:
    texts = sum(len(p) for m in messages for p in m.content if isinstance(p, str))
    calls = sum(len(json.dumps(dict(call.arguments))) for m in messages for call in m.calls)
    return texts + calls + sum(len(json.dumps(tool.described())) for tool in rendering.tools)


def _until(rendered: str, last: Mapping[str, Any], placeholder: str) -> str:
    """The chat up to where the last message's text ends. Raises `RequestError`."""
    text = str(joined(last["content"], placeholder))
    for shown in (text, text.rstrip(), text.strip()):  # templates may trim
        if shown and (at := rendered.rfind(shown)) >= 0:
            return rendered[: at + len(shown)]
    raise RequestError(
        "invalid_value",
        "The last message can't be continued: the model's chat template does not show its text as it is.",
        "continue_final_message",
    )
