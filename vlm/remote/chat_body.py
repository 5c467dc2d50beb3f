"""A chat of the pipeline as the API takes it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from llm.request import SamplingParams
from preprocess.pages import is_pdf
from vlm.pipeline import ChatMessage, ImageInput

_MEDIA_TYPES = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"))
_SAME_NAME = (
    *("min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
)
_DEFAULTS = SamplingParams()


def chat_body(messages: Sequence[ChatMessage], params: SamplingParams) -> dict[str, Any]:
    """Settings at their defaults are left out, but for the length, whose default is the server's own."""
    body: dict[str, Any] = {
        "messages": [
            {"role": message.role, "content": [_part(part) for part in message.content]}
            for message in messages
        ],
        "max_tokens": params.max_tokens,
    }
    for name in _SAME_NAME:
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name):
            body[name] = list(value) if isinstance(value, tuple) else value
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.beam_width > 1:
        body["beam_width"] = params.beam_width
    if params.constraint is not None:
        body["response_format"] = _format(*params.constraint)
    return body


def _format(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"name": "answer", "schema": json.loads(text)}}
    return {"type": kind} if kind == "json_object" else {"type": kind, kind: text}


def _part(part: str | ImageInput) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_uri(part.data), "detail": part.detail}}


def document_part(data: bytes, pages: str | None) -> dict[str, Any]:
    """A PDF, TIFF or image, as images of its pages; `pages`: which, such as 1-3,7."""
    file: dict[str, Any] = {"file_data": data_uri(data)}
    return {"type": "file", "file": file if pages is None else {**file, "pages": pages}}


def data_uri(data: bytes) -> str:
    kind = next((kind for start, kind in _MEDIA_TYPES if data.startswith(start)), "application/octet-stream")
    kind = "application/pdf" if is_pdf(data) else kind
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
