"""An answer's text as it comes -> text for the reader, and calls with their arguments."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from vlm.tools.calls import ToolUse
from vlm.tools.forms import CallForm


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int  # of the answer's calls, from 0
    name: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON, in pieces."""

    index: int
    text: str


Part = Text | CallBegun | Arguments


class JsonEnd:
    """Finds where a JSON object that comes in pieces ends. The text is JSON: the grammar saw to it."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, piece: str) -> int | None:
        """The end within `piece`, if it is there."""
        for at, char in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._in_string = char != '"'
                self._escaped = char == "\\"
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None


class CallParser:
    """Reads one choice of an answer that `vlm.tools.call_grammar` constrains. White space before a
    call belongs to no text."""

    def __init__(self, use: ToolUse, form: CallForm) -> None:
        self._form = form
        self._trigger_id = form.specials.get(form.trigger)
        self._names = {form.shown(form.head(tool.name)): tool.name for tool in use.tools}  # by head
        self._buffer = ""
        self._calling = use.must_call
        self._is_text = False  # an answer that began as text stays text, where there is no trigger
        self._arguments: JsonEnd | None = None
        self.num_calls = 0

    def push(self, text: str, token_ids: tuple[int, ...] = ()) -> list[Part]:
        self._buffer += text
        if self._trigger_id is not None and self._trigger_id in token_ids:
            self._calling = True
        parts: list[Part] = []
        while self._buffer and (more := self._read()):
            parts += more
        return [part for part in parts if part != Text("")]

    def flush(self) -> list[Part]:
        """The end: what had to wait, if it is text."""
        rest, self._buffer = self._buffer, ""
        return [Text(rest)] if rest and not self._calling else []

    def _read(self) -> list[Part]:
        """What the buffer begins with; nothing until there is more."""
        if self._arguments is not None:
            return [self._more_arguments(self._arguments)]
        if self._calling:
            return self._begin()
        return self._before_trigger() if self._form.trigger else self._whole_text()

    def _more_arguments(self, arguments: JsonEnd) -> Arguments:
        end = arguments.find(self._buffer)
        if end is not None:
            self._arguments = None
        return Arguments(self.num_calls - 1, self._take(end))

    def _begin(self) -> list[Part]:
        """The next call's head. Before the first one there may be text that was held back as a stop string's
        possible beginning; what stands between calls is the form's own."""
        found = [(at, head) for head in self._names if (at := self._buffer.find(head)) >= 0]
        if not found:
            return []
        at, head = min(found)
        before = self._take(at).removesuffix(self._form.shown(self._form.opening)).rstrip()
        self._take(len(head))
        self._arguments = JsonEnd()
        self.num_calls += 1
        begun = CallBegun(self.num_calls - 1, self._names[head])
        return [Text(before), begun] if self.num_calls == 1 else [begun]

    def _before_trigger(self) -> list[Part]:
        trigger = self._form.trigger
        at = self._buffer.find(trigger) if self._trigger_id is None else -1
        if at >= 0:
            self._calling = True
            shown = self._take(at).rstrip()
            self._take(len(trigger))
            return [Text(shown)]
        sizes = range(0 if self._trigger_id is not None else len(trigger) - 1, -1, -1)
        undecided = next(size for size in sizes if self._buffer.endswith(trigger[:size]))
        certain = len(self._buffer[: len(self._buffer) - undecided].rstrip())
        return [Text(self._take(certain))] if certain else []

    def _whole_text(self) -> list[Part]:
        if not self._is_text:
            if any(self._buffer.startswith(head) for head in self._names):
                self._calling = True
                return self._begin()
            if any(head.startswith(self._buffer) for head in self._names):
                return []
        self._is_text = True
        return [Text(self._take(None))]

    def _take(self, end: int | None) -> str:
        taken, self._buffer = self._buffer[:end], "" if end is None else self._buffer[end:]
        return taken
