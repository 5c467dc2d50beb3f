"""Requests of OpenAI's Responses API, and the chat that each one is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from vlm.requests.errors import ApiError, invalid
from vlm.requests.params import parsed_chat
from vlm.requests.sampling_schemas import MOST_TOKENS
from vlm.requests.schemas import MAX_MESSAGES, MAX_PARTS, ChatRequest, Detailed
from vlm.requests.tool_schemas import MAX_DESCRIPTION_CHARS, MAX_TOOLS, Lenient, Strict, ToolName

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # there is no reasoning to be encrypted
_UNSUPPORTED = ("background", "conversation", "prompt", "context_management", "moderation", "image")
PARTS = "Content parts are of type input_text, input_image, input_file or output_text."
ITEMS = "Items are of type message, function_call, function_call_output or item_reference."


class ItemPart(Detailed):
    type: str = Field(max_length=64, description="input_text, input_image, input_file or output_text")
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(None, description="As the url of an image in a chat.")
    file_id: str | None = None
    file_data: str | None = Field(None, description="A data: URI with base64.")
    file_url: str | None = None
    pages: str | None = Field(None, description="Extension: 2 or 1-3,7 or 5-; default all.")


Parts = str | Annotated[list[ItemPart], Field(max_length=MAX_PARTS)]


class InputItem(Lenient):
    type: str = Field(
        "message", max_length=64, description="message, function_call, function_call_output or item_reference"
    )
    id: str | None = Field(None, max_length=256)
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=128)
    arguments: str | None = None
    output: Parts | None = None


class ResponseTool(Lenient):
    type: str = Field(max_length=64, description="function")
    name: ToolName | None = None
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class TextFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("answer", max_length=64)
    schema_: dict[str, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Only medium.")


class ResponsesRequest(Strict):
    model: str | None = Field(None, max_length=256, description="Default: the model that is served.")
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="A system prompt, for this answer alone.")
    previous_response_id: str | None = Field(None, max_length=64)
    store: bool | None = Field(None, description="Default true: kept in memory for `response_ttl_s`.")
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2, description="Default 0: greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = Field(None, max_length=16, description=f"Only {', '.join(_INCLUDABLE)}.")
    stream: bool | None = False
    stream_options: JsonValue = Field(None, description="Taken, without effect.")
    text: TextSettings | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: JsonValue = Field(None, description="As of a chat.")
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="Only disabled.")
    reasoning: dict[str, JsonValue] | None = Field(None, description="Only with effort none.")
    service_tier: Literal["auto", "default", "flex", "priority", "batch", "scale"] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Comes back as it is.")
    max_tool_calls: int | None = Field(None, description="Of built-in tools, which there are none of.")
    user: str | None = Field(None, description="Taken, without effect.")
    safety_identifier: str | None = Field(None, description="Taken, without effect.")
    prompt_cache_key: str | None = Field(None, description="Taken, without effect.")
    prompt_cache_retention: str | None = Field(None, description="Taken, without effect.")
    background: JsonValue = Field(None, description="Not supported.")
    conversation: JsonValue = Field(None, description="Not supported: use `previous_response_id`.")
    prompt: JsonValue = Field(None, description="Not supported.")
    context_management: JsonValue = Field(None, description="Not supported.")
    moderation: JsonValue = Field(None, description="Not supported.")
    image: JsonValue = Field(None, description="Not supported.")


class ResponseChat:
    """The chat of a request. `added`: its messages but for the instructions and those of earlier responses,
    as a later request goes on from them."""

    def __init__(
        self,
        body: ResponsesRequest,
        earlier: Sequence[Json] = (),
        find: Callable[[str, str], Json] | None = None,
    ) -> None:
        """`earlier`: of the previous response; `find`: the item of a stored response that an id and its place
        in the request mean. Raises ApiError: 400 for what can't be honoured, and what `find` raises."""
        _check(body)
        self._find = find
        self.added: list[Json] = []
        self._places: list[str] = []  # in the request, of each of `added`
        if isinstance(body.input, str):
            self._add({"role": "user", "content": body.input}, "input")
        else:
            for i, item in enumerate(body.input):
                self._item(item, f"input[{i}]")
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        self._before = len(system) + len(earlier)
        fields = _settings(body) | {"messages": [*system, *earlier, *self.added]}
        try:
            self.request: ChatRequest = parsed_chat(fields)
        except ApiError as error:
            raise self.placed(error) from None

    def _add(self, message: Json, place: str) -> None:
        self.added.append(message)
        self._places.append(place)

    def _item(self, item: InputItem, place: str) -> None:
        match item.type:
            case "message":
                if item.role is None or item.content is None:
                    raise invalid("missing_required_parameter", "A message has a role and content.", place)
                self._add({"role": item.role, "content": _content(item.content, f"{place}.content")}, place)
            case "function_call":
                self._call(item, place)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise invalid("missing_required_parameter", "A result has a call_id and output.", place)
                content = _content(item.output, f"{place}.output")
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": content}, place)
            case "item_reference" if self._find and item.id:
                found = InputItem.model_validate(self._find(item.id, f"{place}.id"))
                self._item(found, place)
            case "reasoning":
                pass  # another model's, which this one would not read
            case _:
                raise invalid(
                    "unsupported_parameter", f"This type of item is not supported. {ITEMS}", f"{place}.type"
                )

    def _call(self, item: InputItem, place: str) -> None:
        """Calls of one answer are one message, with the text before them."""
        if not item.call_id or not item.name:
            raise invalid("missing_required_parameter", "A call has a call_id and a name.", place)
        if not self.added or self.added[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": None}, place)
        function = {"name": item.name, "arguments": item.arguments or ""}
        call = {"id": item.call_id, "type": "function", "function": function}
        self.added[-1].setdefault("tool_calls", []).append(call)

    def placed(self, error: ApiError) -> ApiError:
        """The error with its place in the request as it was sent."""
        error.param = self._place(error.param)
        return error

    def _place(self, param: str | None) -> str | None:
        if param is None:
            return None
        if found := re.match(r"messages\[(\d+)\](.*)", param):
            index, rest = int(found[1]) - self._before, found[2]
            if index < 0:
                return "previous_response_id"
            if index >= len(self._places):
                return "input"
            return self._places[index] + rest.replace(".image_url.url", ".image_url").replace(".file.", ".")
        if param.startswith("response_format"):
            return "text.format"
        return {"messages": "input", "max_tokens": "max_output_tokens"}.get(param, param)


def _check(body: ResponsesRequest) -> None:
    for name in _UNSUPPORTED:
        if getattr(body, name) not in (None, [], {}, False, ""):
            raise _unsupported(name)
    if body.truncation == "auto":
        raise _unsupported("truncation", " to be 'auto'")
    if (body.reasoning or {}).get("effort") not in (None, "none"):
        raise _unsupported("reasoning")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", " other than medium")
    if set(body.include or ()) - set(_INCLUDABLE):
        raise invalid("invalid_value", f"'include' has only {', '.join(_INCLUDABLE)} here.", "include")
    for k, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise invalid("invalid_value", "Tools are of type function, with a name.", f"tools[{k}].type")


def _unsupported(name: str, how: str = "") -> ApiError:
    return invalid("unsupported_parameter", f"This server does not support '{name}'{how}.", name)


def _settings(body: ResponsesRequest) -> Json:
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    return {
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "stream": body.stream,
        "service_tier": body.service_tier,
        "response_format": _format(body.text.format if body.text else None),
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools or ()
        ],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def _format(given: TextFormat | None) -> Json | None:
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    if given.schema_ is None:
        raise invalid("missing_required_parameter", "A schema is missing.", "text.format.schema")
    schema = {"name": given.name, "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": schema}


def _content(content: Any, place: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{place}[{j}]") for j, part in enumerate(content)]


def _part(part: ItemPart, place: str) -> Json:
    match part.type:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part.text}
        case "refusal":
            return {"type": "text", "text": part.refusal or ""}
        case "input_image":
            address = part.image_url if part.image_url is not None else part.file_id
            if address is None:
                raise invalid("missing_required_parameter", "An image has an image_url or a file_id.", place)
            return {"type": "image_url", "image_url": {"url": address, "detail": part.detail}}
        case "input_file":
            data = part.file_data if part.file_data is not None else part.file_url
            file = {"file_data": data, "file_id": part.file_id, "detail": part.detail, "pages": part.pages}
            return {"type": "file", "file": file}
    raise invalid(
        "unsupported_content_part", f"This type of content part is not supported. {PARTS}", f"{place}.type"
    )
