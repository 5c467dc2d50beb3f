"""Events of one or several prompts -> the JSON of a text completion, or the chunks of one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llm.request import TokenLogprob, Usage
from vlm.api.chat.completion import DONE, LogprobsWriter, sse, usage_json
from vlm.api.chat.generate import Generation
from vlm.api.chat.pieces import End, EndReason, Piece, pieces
from vlm.tools.parser import Text
from workers.contract.streams import end_tasks

Json = dict[str, Any]
_MOST_WAITING = 64  # pieces of each prompt that nobody has taken yet


async def _all_pieces(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece | End], None]:
    """Of all prompts as they come, each with its prompt's index. Raises ApiError."""
    waiting: asyncio.Queue[tuple[int, Piece | End | Exception | None]] = asyncio.Queue(
        _MOST_WAITING * len(generations)
    )

    async def draw(index: int) -> None:
        try:
            async with contextlib.aclosing(pieces(generations[index])) as read:
                async for piece in read:
                    await waiting.put((index, piece))
            await waiting.put((index, None))
        except Exception as error:
            await waiting.put((index, error))

    tasks = [asyncio.create_task(draw(index)) for index in range(len(generations))]
    left = len(tasks)
    try:
        while left:
            index, piece = await waiting.get()
            if piece is None:
                left -= 1
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield index, piece
    finally:
        await end_tasks(*tasks)


@dataclass
class _Continuation:
    """One choice of one prompt."""

    index: int
    writer: LogprobsWriter | None
    text: str = ""
    reason: EndReason = "stop"
    logprobs: Json = field(default_factory=lambda: _no_logprobs())
    _length: int = 0  # characters of the tokens told so far

    def take(self, piece: Piece) -> tuple[str, Json | None]:
        """What it adds."""
        text = "".join(part.text for part in piece.parts if isinstance(part, Text))
        told = self._told(piece.logprobs)
        self.text += text
        for name in self.logprobs if told else ():
            self.logprobs[name] += told[name]  # type: ignore[index]
        return text, told

    def _told(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if self.writer is None:
            return None
        told = _no_logprobs()
        for entry in self.writer.json(entries):
            told["tokens"].append(entry["token"])
            told["token_logprobs"].append(entry["logprob"])
            told["top_logprobs"].append({other["token"]: other["logprob"] for other in entry["top_logprobs"]})
            told["text_offset"].append(self._length)
            self._length += len(entry["token"])
        return told


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _continuations(generations: Sequence[Generation]) -> list[list[_Continuation]]:
    """By prompt, by choice."""
    found: list[list[_Continuation]] = []
    for number, generation in enumerate(generations):
        n = generation.num_choices
        wants = generation.prepared.request.params.logprobs is not None
        found.append(
            [_Continuation(number * n + k, LogprobsWriter(generation) if wants else None) for k in range(n)]
        )
    return found


def _head(first: Generation) -> Json:
    return {
        "id": first.id,
        "object": "text_completion",
        "created": first.created,
        "model": first.service.model_name,
        "system_fingerprint": first.service.fingerprint,
    }


def _usage(generations: Sequence[Generation]) -> Json:
    used = [generation.usage for generation in generations if generation.usage is not None]
    return usage_json(Usage(*(sum(getattr(usage, f.name) for usage in used) for f in fields(Usage))))


async def text_completion(generations: Sequence[Generation], echoed: Sequence[str]) -> Json:
    """Reads all to their ends; `echoed`: what stands before each prompt's choices. Raises ApiError."""
    found = _continuations(generations)
    async with contextlib.aclosing(_all_pieces(generations)) as read:
        async for number, piece in read:
            choice = found[number][piece.choice]
            if isinstance(piece, Piece):
                choice.take(piece)
            else:
                choice.reason = piece.reason
    return {
        **_head(generations[0]),
        "choices": [
            {
                "index": choice.index,
                "text": before + choice.text,
                "finish_reason": choice.reason,
                "logprobs": choice.logprobs if choice.writer else None,
            }
            for before, choices in zip(echoed, found, strict=True)
            for choice in choices
        ],
        "usage": _usage(generations),
    }


async def text_chunks(
    generations: Sequence[Generation], echoed: Sequence[str], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, usage if asked for, [DONE]. Raises ApiError."""
    found = _continuations(generations)
    head = _head(generations[0])
    if include_usage:
        head["usage"] = None

    def chunk(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return sse({**head, "choices": [choice]})

    begun: set[int] = set()
    async with contextlib.aclosing(_all_pieces(generations)) as read:
        async for number, piece in read:
            choice = found[number][piece.choice]
            if echoed[number] and choice.index not in begun:
                begun.add(choice.index)
                yield chunk(choice.index, echoed[number])
            if isinstance(piece, End):
                yield chunk(choice.index, "", reason=piece.reason)
                continue
            text, told = choice.take(piece)
            if text or (told and told["tokens"]):
                yield chunk(choice.index, text, told)
    if include_usage:
        yield sse({**head, "choices": [], "usage": _usage(generations)})
    yield DONE
