"""Events -> what Anthropic's clients read: a message, or the events of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from llm.request import Usage
from vlm.api.chat.generate import Generation
from vlm.api.chat.pieces import EndReason, Piece, pieces
from vlm.requests.errors import ApiError, error_body
from vlm.tools.parser import Arguments, CallBegun, Part, Text

STOP_REASONS: dict[EndReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_json(usage: Usage) -> dict[str, int]:
    """Cached tokens are not among the input tokens, as in Anthropic's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _message(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": generation.service.model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


async def message(generation: Generation) -> dict[str, Any]:
    """Reads a generation to its end. Raises ApiError."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    reason: EndReason = "stop"
    async with contextlib.aclosing(pieces(generation)) as answer:
        async for piece in answer:
            if not isinstance(piece, Piece):
                reason = piece.reason
                continue
            for part in piece.parts:
                match part:
                    case Text(text=text):
                        if not blocks or blocks[-1]["type"] != "text":
                            blocks.append({"type": "text", "text": ""})
                        blocks[-1]["text"] += text
                    case CallBegun():
                        arguments[len(blocks)] = ""
                        blocks.append(_call(part))
                    case Arguments(text=text):
                        arguments[len(blocks) - 1] += text
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text or "{}")
    assert generation.usage is not None  # `events` ends with it or raises
    return {
        **_message(generation),
        "content": blocks,
        "stop_reason": STOP_REASONS[reason],
        "usage": usage_json(generation.usage),
    }


async def events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a message. Raises ApiError until the first; later ones become an event."""
    begun = False
    try:
        async with contextlib.aclosing(pieces(generation)) as answer:
            stream = _Stream(generation)
            async for piece in answer:
                if not begun:
                    begun = True
                    yield stream.start()
                if isinstance(piece, Piece):
                    for part in piece.parts:
                        yield stream.part(part)
                else:
                    stream.reason = piece.reason
            yield stream.end()
    except ApiError as error:
        if not begun:
            raise
        body = error_body(error.status_code, error.code, error.message, error.param)
        yield _event("error", **body)


class _Stream:
    """Numbers the blocks of one message."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._index = -1
        self._kind = ""  # of the open block
        self.reason: EndReason = "stop"

    def start(self) -> bytes:
        usage = {"input_tokens": self._generation.prepared.prompt.num_tokens, "output_tokens": 0}
        return _event("message_start", message={**_message(self._generation), "usage": usage})

    def part(self, part: Part) -> bytes:
        match part:
            case Text(text=text):
                opening = b"" if self._kind == "text" else self._open("text", {"type": "text", "text": ""})
                return opening + self._delta({"type": "text_delta", "text": text})
            case CallBegun():
                return self._open("tool_use", _call(part))
            case Arguments(text=text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def end(self) -> bytes:
        usage = self._generation.usage
        assert usage is not None
        delta = {"stop_reason": STOP_REASONS[self.reason], "stop_sequence": None}
        last = _event("message_delta", delta=delta, usage=usage_json(usage)) + _event("message_stop")
        return self._close() + last

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self._close()
        self._index += 1
        self._kind = kind
        return closing + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _call(call: CallBegun) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _event(kind: str, **fields: Any) -> bytes:
    value = json.dumps({"type": kind, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {value}\n\n".encode()
