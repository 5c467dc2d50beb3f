"""What clients get, for the OpenAPI document: answers are written by hand, tests hold them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetail(ApiModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(ApiModel):
    error: ErrorDetail


_DESCRIPTIONS = {
    400: "The request is invalid; `code` and `param` say how and where.",
    401: "No valid API key.",
    404: "Not found.",
    408: "The body took too long.",
    409: "In conflict with what is stored.",
    413: "The body is too large.",
    415: "The content type or encoding is not supported.",
    429: "Too many requests; see Retry-After.",
    431: "Too many headers.",
    503: "Not now; see Retry-After.",
}


BODY = (400, 401, 408, 413, 415, 429, 431, 503)  # of every route that takes a body

# of each event, as OpenAPI before 3.2 has it
EVENT_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


class TopLogprob(ApiModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobOut(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ApiModel):
    content: list[TokenLogprobOut] | None
    refusal: list[TokenLogprobOut] | None


class CalledFunctionOut(ApiModel):
    name: str
    arguments: str


class ToolCallOut(ApiModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionOut


class AssistantMessage(ApiModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallOut] | None = None


class Choice(ApiModel):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChoiceLogprobs | None


class PromptDetails(ApiModel):
    cached_tokens: int
    image_tokens: int
    text_tokens: int
    audio_tokens: int


class UsageOut(ApiModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: dict[str, int]


class TimingsOut(ApiModel):
    preprocess_ms: float
    queue_ms: float
    encode_ms: float
    prefill_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float


class ChatCompletion(ApiModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: str | None
    choices: list[Choice]
    usage: UsageOut
    timings: TimingsOut | None


class AnthropicUsage(ApiModel):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(ApiModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]  # blocks of type text and tool_use
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TextLogprobs(ApiModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters before each token


class TextChoice(ApiModel):
    index: int  # prompt by prompt, `n` of each
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None


class TextCompletion(ApiModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: UsageOut


class EmbeddingOut(ApiModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64: little-endian float32


class EmbeddingList(ApiModel):
    object: Literal["list"]
    data: list[EmbeddingOut]
    model: str
    usage: dict[str, int]


class InputTokenDetails(ApiModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsageOut(ApiModel):
    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseOut(ApiModel):
    """Beside these, settings as they were sent."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]  # items of type message and function_call
    previous_response_id: str | None
    store: bool  # false too for one larger than the store
    usage: ResponseUsageOut | None


class VersionOut(ApiModel):
    version: str


class Placeholder(ApiModel):
    offset: int
    length: int


class RenderedFeatures(ApiModel):
    """By modality, one entry for each run of visual tokens: what it shows, and where it stands."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]


class RenderedChat(ApiModel):
    """What an engine that takes tokens is asked, by the names of vLLM's token-in interface."""

    request_id: str
    model: str
    token_ids: list[int]
    features: RenderedFeatures | None
    sampling_params: dict[str, Any]
    cache_salt: str | None
    stream: bool


class TokenIds(ApiModel):
    """By the names of vLLM and llama.cpp."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(ApiModel):
    """The text by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class InputTokens(ApiModel):
    input_tokens: int


class ModelCard(ApiModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    context_length: int
    tokens_per_tile: int | None  # null where each image is one tile of its own size
    revision: str  # of the checkpoint: equal ones answer alike


class ModelList(ApiModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class GridOut(ApiModel):
    """How an image is cut; rows and cols are 0 when the whole image is one tile."""

    rows: int
    cols: int
    thumbnail: bool
    tile_width: int
    tile_height: int


class StoredImage(ApiModel):
    id: str
    object: Literal["image"] = "image"
    created_at: int
    expires_at: int
    bytes: int
    format: str
    width: int
    height: int
    tiles: int
    image_tokens: int
    grid: GridOut


class Deleted(ApiModel):
    id: str
    object: str
    deleted: bool


class FileOut(ApiModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str


class FileList(ApiModel):
    object: Literal["list"] = "list"
    data: list[FileOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ImageCost(ApiModel):
    width: int
    height: int
    tiles: int
    image_tokens: int
    prompt_tokens: int
    grid: GridOut


class TokenCount(ApiModel):
    prompt_tokens: int
    image_tokens: int
    text_tokens: int
    images: list[ImageCost]
    token_ids: list[int] | None


class ExpectedTtft(ApiModel):
    """Milliseconds by the rates measured so far; null before there are any."""

    cold: float | None
    warm: float | None


class Estimate(ApiModel):
    prompt_tokens: int
    image_tokens: int
    text_tokens: int
    max_completion_tokens: int
    kv_bytes: int
    images: list[ImageCost]
    expected_ttft_ms: ExpectedTtft


class Health(ApiModel):
    status: str
