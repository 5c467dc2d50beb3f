"""Lines of an OpenAI batch file, captioned without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vlm.requests.strict_json import MAX_VALUES, TooManyValues, parse, without_mark

if TYPE_CHECKING:  # whoever only checks lines loads nothing of these
    from llm.request import SamplingParams
    from vlm.pipeline import ChatMessage, ImageInput

ENDPOINT = "/v1/chat/completions"
MAX_LINE_BYTES = 64 << 20
NOT_STRICT = ("invalid_json", "The body is not valid JSON: it holds NaN, Infinity or half a character.")


class BadLine(Exception):
    """A line that can't be run; code and message are fixed texts."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchLine:
    """{"custom_id", "method", "url", "body"} with its envelope checked."""

    custom_id: str
    url: str
    body: dict[str, Any]
    is_strict: bool = True  # or holds NaN or a lone surrogate, which a request's body must not


def placed_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(byte where it begins, line) of lines with anything on them. An over-long line comes cut, so that
    memory stays bounded."""
    with open(path, "rb") as file:
        offset = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            length = len(line)
            if length > MAX_LINE_BYTES:
                while rest := file.readline(MAX_LINE_BYTES):
                    length += len(rest)
                    if rest.endswith(b"\n"):
                        break
            if line.strip():
                yield offset, line
            offset += length


def iterate_lines(path: str) -> Iterator[bytes]:
    """As `placed_lines`, without the places."""
    return (line for _, line in placed_lines(path))


def parse_line(line: bytes, endpoint: str = ENDPOINT) -> BatchLine:
    """Raises `BadLine`."""
    if len(line) > MAX_LINE_BYTES:
        raise BadLine("line_too_long", f"The line has more than {MAX_LINE_BYTES} bytes.")
    value, is_strict = _value(line)
    if not isinstance(value, dict):
        raise BadLine("invalid_line", "The line is not a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512 or not _is_text(custom_id):
        raise BadLine("missing_custom_id", "The line has no custom_id of 1 to 512 characters.")
    if value.get("method") != "POST":
        raise BadLine("invalid_method", "The line's method must be POST.", custom_id)
    if value.get("url") != endpoint:
        raise BadLine("invalid_url", f"The line's url must be {endpoint}.", custom_id)
    if not isinstance(value.get("body"), dict):
        raise BadLine("missing_body", "The line has no body that is a JSON object.", custom_id)
    return BatchLine(custom_id, value["url"], value["body"], is_strict)


def _value(line: bytes) -> tuple[Any, bool]:
    """The line's JSON, and whether it is strict: in one row of many, what isn't is that row's own fault."""
    try:
        return parse(line), True
    except TooManyValues:
        raise BadLine("line_too_complex", f"The line has more than {MAX_VALUES} JSON values.") from None
    except ValueError:
        pass
    try:
        return json.loads(without_mark(line)), False
    except (ValueError, RecursionError):
        raise BadLine("invalid_json_line", "The line is not valid JSON.") from None


def _is_text(text: str) -> bool:
    """It can be written down: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_chat(line: BatchLine, *, default_max_tokens: int) -> tuple[list[ChatMessage], SamplingParams]:
    """What to ask of the pipeline; images must be data: URIs. Raises `BadLine`."""
    from fastapi import HTTPException
    from pydantic import ValidationError

    from preprocess.types import ImageError
    from vlm.config import ServeConfig
    from vlm.pipeline import ChatMessage
    from vlm.requests.errors import ApiError
    from vlm.requests.params import check_supported, sampling_params
    from vlm.requests.schemas import ChatRequest

    if not line.is_strict:
        raise BadLine(*NOT_STRICT, line.custom_id)
    try:
        request = ChatRequest.model_validate(line.body)
        check_supported(request)
        if (request.n or 1) != 1:
            raise BadLine("unsupported_parameter", "'n' must be 1 here.", line.custom_id)
        if request.tools or any(m.role == "tool" or m.tool_calls for m in request.messages):
            raise BadLine("unsupported_parameter", "Tools are not accepted here.", line.custom_id)
        for name in ("chat_template_kwargs", "mm_processor_kwargs", "continue_final_message", "bad_words"):
            if getattr(request, name):
                raise BadLine("unsupported_parameter", f"'{name}' is not accepted here.", line.custom_id)
        params = sampling_params(request, replace(ServeConfig(), default_max_tokens=default_max_tokens))
        messages = [
            ChatMessage(message.role, _parts(message.content or "", f"messages[{index}]"))
            for index, message in enumerate(request.messages)
        ]
        return messages, params
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])[:200]
        raise BadLine(
            "invalid_body", f"The body's field {where} is missing or wrong.", line.custom_id
        ) from None
    except ApiError as error:
        raise BadLine(error.code, error.message, line.custom_id) from None
    except ImageError as error:
        raise BadLine(error.code, error.message, line.custom_id) from None
    except HTTPException:
        raise BadLine("invalid_body", "The body can't be run.", line.custom_id) from None


def _parts(content: Any, where: str) -> tuple[str | ImageInput, ...]:
    from vlm.pipeline import ImageInput
    from vlm.requests.media import Inline, decode_base64, parse_url
    from vlm.requests.schemas import ImageUrl

    if isinstance(content, str):
        return (content,)
    parts: list[str | ImageInput] = []
    for index, part in enumerate(content):
        param = f"{where}.content[{index}]"
        if part.type == "text" and part.text is not None:
            parts.append(part.text)
        elif part.type == "image_url" and part.image_url is not None:
            image = (
                part.image_url
                if not isinstance(part.image_url, str)
                else ImageUrl(url=part.image_url, detail="auto")
            )
            source = parse_url(image.url, param, allow_urls=False)
            if not isinstance(source, Inline):
                raise BadLine("unsupported_image_source", "Images must be data: URIs here.")
            parts.append(ImageInput(decode_base64(source.base64, param), image.detail))
        else:
            raise BadLine("unsupported_content_part", "A content part is neither text nor image_url.")
    return tuple(parts)
