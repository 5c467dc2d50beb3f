"""What clients send: every field with its cap. Unknown fields are ignored, as clients send many;
those that would change what an answer means are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator

from preprocess.types import Detail
from vlm.requests.tool_schemas import MAX_TOOLS, Lenient, ToolCallIn, ToolIn

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_STOP_CHARS = 256
MAX_STOPS = 4
MAX_SCHEMA_CHARS = 100_000
MOST_TOKENS = 1_000_000


class Detailed(Lenient):
    detail: Detail = Field("auto", description="low: one tile; high and auto: tiles by the image's size.")

    @field_validator("detail", mode="before")
    @classmethod
    def _absent(cls, value: object) -> object:
        """Clients send null for what they leave open, and OpenAI's `original` for all of an image."""
        if value == "original":
            return "high"
        return "auto" if value is None else value


class ImageUrl(Detailed):
    url: str = Field(
        description="A data: URI with base64, a stored image's id (img-...) or file's (file-...), or an "
        "http(s) URL when enabled."
    )


class FileIn(Detailed):
    """A document, shown as images of its pages: a PDF, a TIFF, or an image of one page."""

    file_data: str | None = Field(None, description="A data: URI with base64.")
    file_id: str | None = Field(None, description="A file of purpose user_data or vision.")
    pages: str | None = Field(None, description="Extension: 2 or 1-3,7 or 5-; default all.")


class ContentPart(Lenient):
    type: str = Field(max_length=64, description="text, image_url or file")
    text: str | None = None
    image_url: ImageUrl | str | None = Field(
        None, description="An object with `url` and `detail`; a plain string is taken as the url."
    )
    file: FileIn | None = None


def _form_tag(value: Any) -> str:
    """One form is named in an error, the one that was sent."""
    return "list" if isinstance(value, list) else "string"


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(_form_tag),
]


class ChatMessageIn(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCallIn] | None = Field(None, max_length=MAX_TOOLS, description="Of an answer.")
    tool_call_id: str | None = Field(None, max_length=256, description="Of the call that role tool answers.")


class StreamOptions(Lenient):
    include_usage: bool = False


class JsonSchemaFormat(Lenient):
    name: str = Field("answer", max_length=64)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = Field(None, max_length=MAX_SCHEMA_CHARS, description="Extension, with type regex.")
    grammar: str | None = Field(
        None, max_length=MAX_SCHEMA_CHARS, description="Extension, with type grammar (Lark)."
    )


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


Stop = Annotated[
    Annotated[StopString, Tag("string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("list")],
    Discriminator(_form_tag),
]


class ChatRequest(Lenient):
    model: str | None = Field(None, max_length=256, description="Default: the model that is served.")
    messages: list[ChatMessageIn] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    max_tokens: int | None = Field(
        None, ge=-1, le=MOST_TOKENS, description="Older name. -1: as many as fit, as in llama.cpp."
    )
    min_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Extension: no end before.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default 0: greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, max_length=64, description="Extension: these end an answer, and are not part of it."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    n_probs: int | None = Field(None, ge=0, le=20, description="llama.cpp's name for logprobs.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "batch", "scale"] | None = Field(
        None, description="flex and batch give way to interactive requests."
    )
    top_k: int | None = Field(None, ge=0, le=1_000_000, description="Extension; 0 is off.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension.")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="Extension; 1 is off.")
    beam_width: int | None = Field(
        None, ge=1, le=128, description="Extension: beam search with so many beams, the best `n` returned."
    )
    use_beam_search: bool | None = Field(
        None, description="Extension: beam search with `n` beams where `beam_width` does not say."
    )
    best_of: int | None = Field(None, ge=1, le=128, description="Not supported beyond `n`.")
    ignore_eos: bool | None = Field(None, description="Extension, for load tests.")
    skip_special_tokens: bool | None = Field(
        None,
        description="Extension: leave special tokens out of the answer. Default: all but the markup that "
        "the model answers in, such as DocTags.",
    )
    deadline_s: float | None = Field(
        None, gt=0, le=86400, description="Extension: refuse at once what can't be answered in time."
    )
    tools: list[ToolIn] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: JsonValue = Field(
        None, description="none, auto, required, a named function or allowed_tools; default auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    functions: JsonValue = Field(None, description="Not supported: refused unless empty.")
    function_call: JsonValue = Field(None, description="Not supported: only none and auto.")
    audio: JsonValue = Field(None, description="Not supported.")
    modalities: list[str] | None = Field(None, max_length=8, description="Only text.")
    web_search_options: JsonValue = Field(None, description="Not supported.")
    # names of other servers for what would change an answer here too, if it were known
    guided_json: JsonValue = Field(None, description="vLLM's name: a JSON schema that the answer matches.")
    guided_regex: JsonValue = Field(None, description="vLLM's name: a regular expression.")
    guided_choice: JsonValue = Field(None, description="vLLM's name: a list of answers.")
    guided_grammar: JsonValue = Field(None, description="vLLM's name: a grammar in Lark's notation.")
    structured_outputs: JsonValue = Field(
        None, description="vLLM's name: an object with json, regex, choice, grammar or json_object."
    )
    json_schema: JsonValue = Field(None, description="llama.cpp's name: a JSON schema.")
    grammar: JsonValue = Field(None, description="Not supported: use `guided_grammar`.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="vLLM's name: only equal salts share cached work."
    )
    bad_words: JsonValue = Field(None, description="Not supported.")
    chat_template: JsonValue = Field(None, description="Not supported.")
    continue_final_message: JsonValue = Field(None, description="Not supported.")

    @field_validator("max_tokens")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for as many as fit")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(token.isascii() and token.isdigit() and len(token) < 10 for token in value):
            raise ValueError("keys must be token ids")
        return value


class TokenizeRequest(Lenient):
    """Either a chat or a text."""

    model: str | None = Field(None, max_length=256)
    messages: list[ChatMessageIn] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    text: str | None = Field(None, max_length=200_000)


class PlainTokenizeRequest(Lenient):
    """As vLLM's and llama.cpp's: a chat, or a text by either name."""

    model: str | None = Field(None, max_length=256)
    messages: list[ChatMessageIn] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: str | None = Field(None, max_length=200_000)
    content: str | None = Field(None, max_length=200_000)


class DetokenizeRequest(Lenient):
    model: str | None = Field(None, max_length=256)
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=1_000_000)


class EstimateRequest(Lenient):
    model: str | None = Field(None, max_length=256)
    messages: list[ChatMessageIn] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)


class ImageUpload(Lenient):
    image: str = Field(min_length=1, description="A data: URI with base64.")
    id: str | None = Field(None, max_length=64, description="Checked against the id that the content has.")
