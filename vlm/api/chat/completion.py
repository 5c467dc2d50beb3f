"""Events -> the JSON that the official client reads: a completion, or the chunks of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from llm.request import Timings, TokenLogprob, Usage
from llm.text.outputs import LeadingSpaces, without_spaces
from vlm.api.chat.generate import Generation
from vlm.api.chat.pieces import Piece, pieces
from vlm.requests.errors import ApiError, error_body
from vlm.tools.parser import Arguments, CallBegun, Part, Text


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "image_tokens": usage.image_tokens,
            "text_tokens": usage.prompt_tokens - usage.image_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def timings_json(timings: Timings) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(timings).items()}


class LogprobsWriter:
    """Log-probabilities of one choice's tokens as JSON.

    Every token is told as what it adds to the content: a space that is dropped there is dropped here, from
    the token and from what could have stood in its place.
    """

    def __init__(self, generation: Generation) -> None:
        self._tokenizer = generation.service.pipeline.spec.tokenizer
        params = generation.prepared.request.params
        self._skip_special = params.skip_special_tokens
        self._spaces = LeadingSpaces(params)

    def json(self, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        told = []
        for entry in entries:
            alternatives = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            told.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": alternatives})
            self._spaces.take_off(
                self._tokenizer.token_bytes(entry.token_id, skip_special=self._skip_special)
            )
        return told

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        if data:
            data = without_spaces(data, self._spaces.left)
            text = data.decode(errors="replace")
        else:
            text = self._tokenizer.decode([token_id], skip_special=False)
            data = text.encode()
        # -9999 stands for minus infinity, which JSON lacks; the official API does the same
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(data)}


@dataclass
class _Choice:
    writer: LogprobsWriter
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, part: Part) -> None:
        match part:
            case Text(text=text):
                self.texts.append(text)
            case CallBegun():
                self.calls.append(call_json(part))
            case Arguments(index=index, text=text):
                self.calls[index]["function"]["arguments"] += text

    def message(self) -> dict[str, Any]:
        content = "".join(self.texts)
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "content": content or None, "tool_calls": self.calls} if self.calls else message


def call_json(call: CallBegun) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}


def _head(generation: Generation, kind: str, service_tier: str) -> dict[str, Any]:
    service = generation.service
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": service.model_name,
        "system_fingerprint": service.fingerprint,
        "service_tier": service_tier,
    }


async def completion(generation: Generation, service_tier: str = "default") -> dict[str, Any]:
    """Reads a generation to its end. Raises ApiError."""
    wants_logprobs = generation.prepared.request.params.logprobs is not None
    choices = [_Choice(LogprobsWriter(generation)) for _ in range(generation.num_choices)]
    async with contextlib.aclosing(pieces(generation)) as answer:
        async for piece in answer:
            choice = choices[piece.choice]
            if isinstance(piece, Piece):
                for part in piece.parts:
                    choice.add(part)
                choice.logprobs += choice.writer.json(piece.logprobs)
            else:
                choice.finish_reason = piece.reason
    assert generation.usage is not None and generation.timings is not None  # `events` ends with it or raises
    return {
        **_head(generation, "chat.completion", service_tier),
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "finish_reason": choice.finish_reason,
                "logprobs": {"content": choice.logprobs, "refusal": None} if wants_logprobs else None,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_json(generation.usage),
        "timings": timings_json(generation.timings),
    }


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def sse_error(error: ApiError) -> bytes:
    return sse(error_body(error.status_code, error.code, error.message, error.param))


async def chunks(
    generation: Generation, *, include_usage: bool, service_tier: str = "default"
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: roles, contents, finishes, usage if asked for, [DONE]. Raises ApiError."""
    head = _head(generation, "chat.completion.chunk", service_tier)
    if include_usage:
        head["usage"] = None
    writers = [LogprobsWriter(generation) for _ in range(generation.num_choices)]
    wants_logprobs = generation.prepared.request.params.logprobs is not None

    def chunk(index: int, delta: dict[str, Any], beside: dict[str, Any] | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return sse({**head, "choices": [choice], **(beside or {})})

    begun = False
    async with contextlib.aclosing(pieces(generation)) as answer:
        async for piece in answer:
            if not begun:
                begun = True
                for index in range(generation.num_choices):
                    yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
            if isinstance(piece, Piece):
                logprobs = {"content": writers[piece.choice].json(piece.logprobs), "refusal": None}
                deltas = [_delta(part) for part in piece.parts]
                if not deltas and piece.logprobs:
                    deltas = [{"content": ""}]
                for number, delta in enumerate(deltas):
                    told = logprobs if wants_logprobs and number == 0 else None
                    yield chunk(piece.choice, delta, logprobs=told)
            else:
                # the last choice's finish chunk tells the timings too
                timings = {"timings": timings_json(piece.timings)} if piece.timings else {}
                yield chunk(piece.choice, {}, timings, finish_reason=piece.reason)
    if include_usage and generation.usage is not None:
        yield sse({**head, "choices": [], "usage": usage_json(generation.usage)})
    yield DONE


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text=text):
            return {"content": text}
        case CallBegun(index=index):
            return {"tool_calls": [{"index": index, **call_json(part)}]}
        case Arguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
