"""A chat request's tools -> what the model may call, and the calls of earlier answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm.requests.errors import invalid
from vlm.requests.sampling_schemas import MAX_SCHEMA_CHARS
from vlm.requests.schemas import ChatMessageIn, ChatRequest
from vlm.requests.strict_json import parse
from vlm.requests.tool_schemas import ToolCallIn
from vlm.tools.calls import MOST_CALLS, Call, Tool, ToolUse

_CHOICES = (
    "'tool_choice' is 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
    "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}."
)


def tool_use(body: ChatRequest) -> ToolUse | None:
    """None where the answer is to be text. Raises ApiError 400."""
    tools = _tools(body)
    mode, names = _choice(body.tool_choice)
    if not tools:
        if mode == "required":
            raise invalid(
                "invalid_value", "'tool_choice' asks for a call, but 'tools' is empty.", "tool_choice"
            )
        return None
    if mode == "none":
        return None
    unknown = set(names or ()) - {tool.name for tool in tools}
    if unknown:
        raise invalid("invalid_value", "'tool_choice' names a tool that 'tools' lacks.", "tool_choice")
    if body.use_beam_search or (body.beam_width or 1) > 1:
        raise invalid("invalid_value", "Beam search can't be combined with tools.", "tools")
    chosen = tuple(tool for tool in tools if names is None or tool.name in names)
    is_single = body.parallel_tool_calls is False or _is_named(body.tool_choice)
    return ToolUse(chosen, mode == "required", 1 if is_single else MOST_CALLS)


def _tools(body: ChatRequest) -> list[Tool]:
    tools = [
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            bool(tool.function.strict),
        )
        for tool in body.tools or ()
    ]
    if len({tool.name for tool in tools}) != len(tools):
        raise invalid("invalid_value", "Two tools have the same name.", "tools")
    if sum(len(json.dumps(tool.described())) for tool in tools) > MAX_SCHEMA_CHARS:
        raise invalid("invalid_value", f"The tools have more than {MAX_SCHEMA_CHARS} characters.", "tools")
    return tools


def _is_named(choice: Any) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == "function"


def _choice(choice: Any) -> tuple[str, list[str] | None]:
    """(none, auto or required, names of the tools that may be called; None: all). Raises ApiError 400."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto", None
    if _is_named(choice) and (name := _name(choice)) is not None:
        return "required", [name]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if isinstance(tools, list) and tools and allowed.get("mode") in ("auto", "required"):
            names = [_name(tool) for tool in tools]
            if all(name is not None for name in names):
                return allowed["mode"], [name for name in names if name is not None]
    raise invalid("invalid_value", f"The value of 'tool_choice' is not accepted. {_CHOICES}", "tool_choice")


def _name(named: Any) -> str | None:
    """In {"type": "function", "function": {"name": ...}}, or the shorter form of the Responses API."""
    if not isinstance(named, Mapping):
        return None
    function = named.get("function", named)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def calls_of(message: ChatMessageIn, place: str) -> tuple[Call, ...]:
    """Of an answer. Raises ApiError 400 for arguments that are no JSON object."""
    if not message.tool_calls:
        return ()
    if message.role != "assistant":
        raise invalid("invalid_value", "Only messages of role assistant have calls.", f"{place}.tool_calls")
    return tuple(
        Call(call.id, call.function.name, _arguments(call, f"{place}.tool_calls[{i}].function.arguments"))
        for i, call in enumerate(message.tool_calls)
    )


def _arguments(call: ToolCallIn, place: str) -> Mapping[str, Any]:
    given = call.function.arguments
    if isinstance(given, str):
        try:
            given = parse(given.encode()) if given.strip() else {}
        except ValueError:
            given = None  # type: ignore[assignment]
    if not isinstance(given, dict):
        raise invalid("invalid_value", "A call's arguments must be a JSON object, as a string.", place)
    return given


def answered_call(message: ChatMessageIn, earlier: Sequence[Call], place: str) -> Call:
    """The call that a message of role tool answers. Raises ApiError 400."""
    param = f"{place}.tool_call_id"
    if message.tool_call_id is None:
        raise invalid("missing_required_parameter", "A message of role tool needs 'tool_call_id'.", param)
    for call in reversed(earlier):
        if call.id == message.tool_call_id:
            return call
    raise invalid("invalid_value", "No message before this one has a call with this id.", param)
