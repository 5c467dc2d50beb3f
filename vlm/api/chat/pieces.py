"""Events -> what readers of an answer want: text, calls with their arguments, how each choice ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from llm.request import Delta, Timings, TokenLogprob
from vlm.api.chat.generate import Generation
from vlm.tools.parser import CallParser, Part, Text

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one choice. `logprobs` are of the tokens it came with."""

    choice: int
    parts: Sequence[Part]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    choice: int
    reason: EndReason
    timings: Timings | None


async def pieces(generation: Generation) -> AsyncGenerator[Piece | End, None]:
    """Raises ApiError. Closing it cancels the request."""
    parsers: list[CallParser] = []
    if generation.tool_use is not None:
        form = generation.service.pipeline.spec.prompt_builder.call_form
        parsers = [CallParser(generation.tool_use, form) for _ in range(generation.num_choices)]
    async with contextlib.aclosing(generation.events()) as events:
        async for event in events:
            parser = parsers[event.choice] if parsers else None
            if isinstance(event, Delta):
                parts = parser.push(event.text, event.token_ids) if parser else _text(event.text)
                yield Piece(event.choice, parts, event.logprobs)
                continue
            if parser and (rest := parser.flush()):
                yield Piece(event.choice, rest)
            has_calls = parser is not None and parser.num_calls > 0 and event.reason == "stop"
            yield End(event.choice, "tool_calls" if has_calls else event.reason, event.timings)


def _text(text: str) -> list[Part]:
    return [Text(text)] if text else []
