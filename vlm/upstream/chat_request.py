"""A request as OpenAI's chat completions take it: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llm.request import RequestError, SamplingParams
from vlm.pipeline import Chat, ChatMessage, ImageInput
from vlm.prompt import Rendering
from vlm.remote.chat_body import data_uri, settings_of


def chat_body(model: str, chat: Chat, params: SamplingParams, namespace: str) -> dict[str, Any]:
    """The JSON to post. Raises `RequestError` for what can't be said there."""
    check(chat, params)
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in chat.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings_of(params),
    }
    if chat.rendering.variables:
        body["chat_template_kwargs"] = dict(chat.rendering.variables)
    if namespace:
        body["cache_salt"] = namespace
    return body


def check(chat: Chat, params: SamplingParams) -> None:
    """Raises `RequestError`, with the parameter, for what another server can't be asked."""
    for name, is_asked in _unavailable(chat.rendering, params):
        if is_asked:
            raise RequestError(
                "unsupported_parameter", f"'{name}' is not available: another server runs this model.", name
            )


def _unavailable(rendering: Rendering, params: SamplingParams) -> Iterator[tuple[str, bool]]:
    yield "use_beam_search", params.beam_width > 1
    yield "logprobs", params.logprobs is not None
    yield "prompt_logprobs", params.prompt_logprobs is not None
    yield "tools", bool(rendering.tools)
    yield "continue_final_message", rendering.continues_last
    yield "add_generation_prompt", not rendering.begins_answer


def _message(message: ChatMessage) -> dict[str, Any]:
    if message.calls or message.role == "tool":
        raise RequestError(
            "unsupported_parameter", "'tools' is not available: another server runs this model.", "tools"
        )
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": _content(message.content), **named}


def _content(parts: Sequence[str | ImageInput]) -> str | list[Mapping[str, Any]]:
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [_text(part) if isinstance(part, str) else _image(part) for part in parts]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: ImageInput) -> dict[str, Any]:
    detail = {} if image.detail == "auto" else {"detail": image.detail}
    return {"type": "image_url", "image_url": {"url": data_uri(image.data), **detail}}
