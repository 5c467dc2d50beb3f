"""Requests of Anthropic's Messages API, and the chat that each one is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from vlm.requests.errors import invalid
from vlm.requests.params import parsed_chat
from vlm.requests.sampling_schemas import MAX_STOPS, MOST_TOKENS, StopString
from vlm.requests.schemas import MAX_MESSAGES, MAX_PARTS, ChatRequest
from vlm.requests.tool_schemas import MAX_DESCRIPTION_CHARS, MAX_TOOLS, Lenient, Strict, ToolName

Json = dict[str, Any]


class BlockSource(Lenient):
    type: str = Field(max_length=64, description="base64, url, file or text")
    media_type: str | None = Field(None, max_length=128)
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class MessageBlock(Lenient):
    type: str = Field(max_length=64, description="text, image, document, tool_use or tool_result")
    text: str | None = None
    source: BlockSource | None = None
    id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=128)
    input: dict[str, JsonValue] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    content: str | list[MessageBlock] | None = None


class MessageIn(Lenient):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[MessageBlock], Field(max_length=MAX_PARTS)]


class AnthropicTool(Lenient):
    type: str | None = Field(None, max_length=64, description="custom, or left out.")
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    input_schema: dict[str, JsonValue] | None = None


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class CountRequest(Strict):
    model: str | None = Field(None, max_length=256, description="Default: the model that is served.")
    messages: list[MessageIn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[MessageBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: dict[str, JsonValue] | None = Field(None, description="Only of type disabled.")
    metadata: JsonValue = Field(None, description="Taken, without effect.")
    service_tier: str | None = Field(None, max_length=64, description="Taken, without effect.")
    cache_control: JsonValue = Field(None, description="Taken, without effect: whatever can be is cached.")


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=1, description="Default 0: greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    stream: bool = False


def chat_of(body: CountRequest) -> ChatRequest:
    """Raises ApiError 400 for blocks that mean nothing here, with their place in the request."""
    if body.thinking is not None and body.thinking.get("type") not in (None, "disabled"):
        raise invalid("unsupported_parameter", "This server does not support 'thinking'.", "thinking")
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text_of(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    chat: Json = {"model": body.model, "messages": messages, **_tools(body)}
    if isinstance(body, MessagesRequest):
        chat |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
        }
    return parsed_chat(chat)


def _messages(message: MessageIn, place: str) -> list[Json]:
    """One of theirs is several of ours: results of tools have messages of their own, before the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    calls: list[Json] = []
    parts: list[Json] = []
    for j, block in enumerate(message.content):
        where = f"{place}.content[{j}]"
        if block.type == "tool_result":
            results.append(_result(block, where))
        elif block.type == "tool_use":
            calls.append(_call(block, where))
        elif block.type not in ("thinking", "redacted_thinking"):
            parts.append(_part(block, where))
    if not calls and not parts:
        return results or [{"role": message.role, "content": ""}]
    own: Json = {"role": message.role, "content": parts or None}
    return [*results, {**own, "tool_calls": calls} if calls else own]


def _part(block: MessageBlock, place: str) -> Json:
    match block.type:
        case "text":
            return {"type": "text", "text": block.text or ""}
        case "image":
            return {"type": "image_url", "image_url": {"url": _address(block.source, place)}}
        case "document":
            if block.source is not None and block.source.type == "text":
                return {"type": "text", "text": block.source.data or ""}
            name = "file_id" if block.source is not None and block.source.type == "file" else "file_data"
            return {"type": "file", "file": {name: _address(block.source, place)}}
    raise invalid(
        "unsupported_content_part",
        "Blocks are of type text, image, document, tool_use or tool_result.",
        f"{place}.type",
    )


def _address(source: BlockSource | None, place: str) -> str:
    if source is not None:
        match source.type:
            case "base64" if source.data is not None:
                return f"data:{source.media_type or 'application/octet-stream'};base64,{source.data}"
            case "url" if source.url is not None:
                return source.url
            case "file" if source.file_id is not None:
                return source.file_id
    raise invalid(
        "invalid_value", "A source is of type base64 with data, url, or file with file_id.", f"{place}.source"
    )


def _call(block: MessageBlock, place: str) -> Json:
    if block.id is None or block.name is None:
        raise invalid("missing_required_parameter", "A block of type tool_use needs 'id' and 'name'.", place)
    arguments = json.dumps(block.input or {}, separators=(",", ":"), ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: MessageBlock, place: str) -> Json:
    if block.tool_use_id is None:
        raise invalid("missing_required_parameter", "A block of type tool_result needs 'tool_use_id'.", place)
    content: Any = block.content or ""
    if not isinstance(content, str):
        content = [_part(part, f"{place}.content[{k}]") for k, part in enumerate(content)]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _text_of(system: str | list[MessageBlock], place: str) -> str:
    if isinstance(system, str):
        return system
    for k, block in enumerate(system):
        if block.type != "text":
            raise invalid("invalid_value", "The system prompt has blocks of type text.", f"{place}[{k}].type")
    return "\n".join(block.text or "" for block in system)


def _tools(body: CountRequest) -> Json:
    if not body.tools:
        return {}
    for k, tool in enumerate(body.tools):
        if tool.type not in (None, "custom"):
            raise invalid("invalid_value", "Tools are of type custom.", f"tools[{k}].type")
    chosen: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    choice = body.tool_choice
    given: Json = {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in body.tools
        ]
    }
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        given["tool_choice"] = named if choice.type == "tool" else chosen[choice.type]
        given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return given
