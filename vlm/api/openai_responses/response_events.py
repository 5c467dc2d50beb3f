"""Events -> what clients of the Responses API read: a response, or the events of one."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from llm.request import Usage
from vlm.api.chat.completion import LogprobsWriter, call_json
from vlm.api.chat.generate import Generation
from vlm.api.chat.pieces import EndReason, Piece, pieces
from vlm.requests.errors import ApiError
from vlm.requests.response_schemas import ResponsesRequest
from vlm.tools.parser import Arguments, CallBegun, Part, Text

Json = dict[str, Any]
Keep = Callable[[Json, Json], None]  # a finished response, and its answer as a message of a chat


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_head(generation: Generation, body: ResponsesRequest) -> Json:
    """Everything but the outcome: settings come back as they were sent."""
    sent = body.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": generation.id.replace("chatcmpl-", "resp_"),
        "object": "response",
        "created_at": generation.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "model": generation.service.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature or 0.0,
        "tool_choice": body.tool_choice or "auto",
        "tools": sent.get("tools", []),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": body.previous_response_id,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, **sent.get("text", {})},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
    }


async def response(generation: Generation, body: ResponsesRequest, keep: Keep) -> Json:
    """Reads a generation to its end. Raises ApiError."""
    answer = _GrowingResponse(generation, body)
    async with contextlib.aclosing(pieces(generation)) as read:
        async for piece in read:
            for _ in answer.take(piece):
                pass
    for _ in answer.end(keep):
        pass
    return answer.response


async def events(generation: Generation, body: ResponsesRequest, keep: Keep) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises ApiError until the first; later ones are an event."""
    answer = _GrowingResponse(generation, body)
    begun = False
    number = 0

    def numbered(found: Iterator[Json]) -> bytes:
        nonlocal number
        data = b""
        for event in found:
            event["sequence_number"] = number
            number += 1
            value = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
            data += f"event: {event['type']}\ndata: {value}\n\n".encode()
        return data

    try:
        async with contextlib.aclosing(pieces(generation)) as read:
            async for piece in read:
                if not begun:
                    begun = True
                    yield numbered(answer.begin())
                if data := numbered(answer.take(piece)):
                    yield data
        yield numbered(answer.end(keep))
    except ApiError as error:
        if not begun:
            raise
        yield numbered(answer.fail(error))


class _GrowingResponse:
    """A response as it grows; every step says its events."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self.response = response_head(generation, body)
        self._generation = generation
        self._writer = LogprobsWriter(generation)
        self._wants_logprobs = generation.prepared.request.params.logprobs is not None
        self._logprobs: list[Json] = []  # of tokens whose text is still to come
        self._open: Json | None = None  # the item that grows
        self._reason: EndReason = "stop"
        self._message: Json = {"role": "assistant", "content": None}

    @property
    def _items(self) -> list[Json]:
        items: list[Json] = self.response["output"]
        return items

    def begin(self) -> Iterator[Json]:
        yield {"type": "response.created", "response": self.response}
        yield {"type": "response.in_progress", "response": self.response}

    def take(self, piece: Any) -> Iterator[Json]:
        if not isinstance(piece, Piece):
            self._reason = piece.reason
            return
        if self._wants_logprobs:
            self._logprobs += self._writer.json(piece.logprobs)
        for part in piece.parts:
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text=text):
                yield from self._text(text)
            case CallBegun(name=name, id=call_id):
                yield from self._close("completed")
                self._message.setdefault("tool_calls", []).append(call_json(part))
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                yield self._begin(call, "fc")
            case Arguments(text=text):
                assert self._open is not None
                self._open["arguments"] += text
                yield self._of_item("function_call_arguments.delta", delta=text)

    def _text(self, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close("completed")
            yield self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
            assert self._open is not None
            content: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._of_item("content_part.added", content_index=0, part=dict(content))
            self._open["content"].append(content)
        content = self._open["content"][0]
        told, self._logprobs = self._logprobs, []
        content["text"] += text
        content["logprobs"] += told
        if text:
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=told)

    def _begin(self, item: Json, prefix: str) -> Json:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._items.append(item)
        self._open = item
        return {"type": "response.output_item.added", "output_index": self._index, "item": item}

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        return {
            "type": f"response.{kind}",
            "item_id": self._open["id"],
            "output_index": self._index,
            **fields,
        }

    def _close(self, status: str) -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            content = item["content"][0]
            self._message["content"] = (self._message["content"] or "") + content["text"]
            told = {"text": content["text"], "logprobs": content["logprobs"]}
            yield self._of_item("output_text.done", content_index=0, **told)
            yield self._of_item("content_part.done", content_index=0, part=content)
        else:
            self._message["tool_calls"][-1]["function"]["arguments"] = item["arguments"]
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **done)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self._open = None

    def end(self, keep: Keep) -> Iterator[Json]:
        if not self._items:
            yield from self._text("")
        status = "incomplete" if self._reason == "length" else "completed"
        yield from self._close(status)
        assert self._generation.usage is not None  # `events` ends with it or raises
        self.response |= {"status": status, "usage": usage_json(self._generation.usage)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        keep(self.response, self._message)
        yield {"type": f"response.{status}", "response": self.response}

    def fail(self, error: ApiError) -> Iterator[Json]:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield {"type": "response.failed", "response": self.response}
