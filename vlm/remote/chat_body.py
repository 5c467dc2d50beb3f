"""A chat of the pipeline as OpenAI's API takes it: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from llm.request import SamplingParams
from preprocess.pages import is_pdf
from preprocess.probe import sniff
from preprocess.types import ImageError
from vlm.pipeline import ChatMessage, ImageInput

# parameter -> its value where it asks for nothing; OpenAI's own names, then those that vLLM, SGLang and
# llama.cpp add
_PARAMETERS: dict[str, Any] = {
    "temperature": None,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "n": 1,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": None,
}


def chat_body(messages: Sequence[ChatMessage], params: SamplingParams) -> dict[str, Any]:
    """The JSON to post to a server of this project."""
    asked = [{"role": m.role, "content": [_part(part) for part in m.content]} for m in messages]
    beams = {"beam_width": params.beam_width} if params.beam_width > 1 else {}
    return {"messages": asked, **settings_of(params), **beams}


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """What asks for nothing is left out. Beams and log-probabilities are the caller's to ask for."""
    settings: dict[str, Any] = {"max_tokens": params.max_tokens}
    for name, nothing in _PARAMETERS.items():
        if (value := getattr(params, name)) != nothing:
            settings[name] = value
    if params.stop:
        settings["stop"] = list(params.stop)
    if params.stop_token_ids:
        settings["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        settings["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return {**settings, **_constraint(params)}


def _constraint(params: SamplingParams) -> dict[str, Any]:
    if params.constraint is None:
        return {}
    kind, text = params.constraint
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {kind: text}}


def _part(part: str | ImageInput) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_uri(part.data), "detail": part.detail}}


def document_part(data: bytes, pages: str | None) -> dict[str, Any]:
    """A PDF, TIFF or image, as images of its pages; `pages`: which, such as 1-3,7."""
    file: dict[str, Any] = {"file_data": data_uri(data)}
    return {"type": "file", "file": file if pages is None else {**file, "pages": pages}}


def data_uri(data: bytes) -> str:
    """Of a PDF, an image, or what the server is to refuse."""
    try:
        kind = "application/pdf" if is_pdf(data) else f"image/{sniff(data).lower()}"
    except ImageError:
        kind = "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
