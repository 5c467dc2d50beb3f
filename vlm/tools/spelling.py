"""Tools for chat templates that know none: described, called and answered in ordinary messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm.tools.forms import CallForm

TemplateMessage = dict[str, Any]
"""As chat templates take it: {role, content: list of parts, and tool_calls or tool_call_id and name}."""


def spelled_out(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], form: CallForm
) -> list[TemplateMessage]:
    """The chat with `tools` described in its system message, calls written into answers as `form` has them
    and results into messages of the user, whose own next message goes on after them."""
    spelled: list[TemplateMessage] = []
    last_was_result = False
    for message in messages:
        role, content = message["role"], list(message["content"])
        if role == "assistant" and message.get("tool_calls"):
            content.append(_text(_calls(message["tool_calls"], form)))
        if role == "tool":
            role = "user"
            content = [_text("<tool_response>\n"), *content, _text("\n</tool_response>")]
        if role == "user" and last_was_result:
            spelled[-1]["content"] += [_text("\n"), *content]
        else:
            spelled.append({"role": role, "content": content})
        last_was_result = message["role"] == "tool"
    if tools:
        _describe(spelled, tools, form)
    return [{**message, "content": _merged(message["content"])} for message in spelled]


def _merged(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Texts that follow each other as one: templates may read a message's first part alone."""
    merged: list[Mapping[str, Any]] = []
    for part in parts:
        if merged and part["type"] == merged[-1]["type"] == "text":
            merged[-1] = _text(merged[-1]["text"] + part["text"])
        else:
            merged.append(part)
    return merged


def _describe(messages: list[TemplateMessage], tools: Sequence[Mapping[str, Any]], form: CallForm) -> None:
    text = _instructions(tools, form)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"].append(_text(f"\n\n{text}"))
    else:
        messages.insert(0, {"role": "system", "content": [_text(text)]})


def _instructions(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    listed = "\n".join(
        json.dumps(tool["function"], ensure_ascii=False, separators=(",", ":")) for tool in tools
    )
    shape = f"{form.trigger}{form.before_name}NAME{form.before_arguments}ARGUMENTS{form.after_arguments}"
    return f"Tools, with JSON schemas of their arguments:\n{listed}\nTo call one, write:\n{shape}"


def _calls(calls: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    written = [form.call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return form.trigger + form.opening + form.between.join(written) + form.ending


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
