"""What clients send: every field with its cap. A request's unknown fields are refused, those inside of its
messages ignored, as clients send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator

from preprocess.types import Detail
from vlm.requests.sampling_schemas import MOST_TOKENS, SamplingFields, form_tag
from vlm.requests.tool_schemas import MAX_TOOLS, Lenient, Strict, ToolCallIn, ToolIn

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 64


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


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(form_tag),
]


class ChatMessageIn(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCallIn] | None = Field(None, max_length=MAX_TOOLS, description="Of an answer.")
    tool_call_id: str | None = Field(None, max_length=256, description="Of the call that role tool answers.")


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class MediaSettings(Strict):
    max_pixels: int | None = Field(None, ge=4096, le=1 << 28)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _prompt_tag(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "string"
    first = value[0]
    return (
        "token_list" if isinstance(first, int) else "token_lists" if isinstance(first, list) else "text_list"
    )


Prompts = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("text_list")]
    | Annotated[list[TokenId], Field(max_length=MOST_TOKENS), Tag("token_list")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(max_length=MAX_PROMPTS), Tag("token_lists")
    ],
    Discriminator(_prompt_tag),
]


Embedded = Annotated[
    Annotated[str, Tag("string")] | Annotated[ContentPart, Tag("part")],
    Discriminator(lambda value: "string" if isinstance(value, str) else "part"),
]


class TemplateFields(Strict):
    """How a chat is written, beside its messages."""

    tools: list[ToolIn] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: JsonValue = Field(
        None, description="none, auto, required, a named function or allowed_tools; default auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    chat_template: JsonValue = Field(None, description="Not supported.")
    add_generation_prompt: bool | None = Field(
        None, description="vLLM's name. false: the prompt ends where the last message does."
    )
    continue_final_message: bool | None = Field(
        None, description="vLLM's name: the answer goes on with the last message's text."
    )
    chat_template_kwargs: dict[VariableName, JsonValue] | None = Field(
        None, max_length=32, description="vLLM's name: variables that the chat template reads."
    )
    mm_processor_kwargs: MediaSettings | None = Field(
        None, description="vLLM's name: `max_pixels` of images that are taken whole, at their own size."
    )


class ChatRequest(TemplateFields, SamplingFields):
    model: str | None = Field(None, max_length=256, description="Default: the model that is served.")
    messages: list[ChatMessageIn] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    functions: JsonValue = Field(None, description="Not supported: refused unless empty.")
    function_call: JsonValue = Field(None, description="Not supported: only none and auto.")
    audio: JsonValue = Field(None, description="Not supported.")
    modalities: list[str] | None = Field(None, max_length=8, description="Only text.")
    web_search_options: JsonValue = Field(None, description="Not supported.")

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else super().asked_logprobs


class CompletionRequest(SamplingFields):
    """A text to go on with, without a chat's template."""

    model: str | None = Field(None, max_length=256, description="Default: the model that is served.")
    prompt: Prompts = Field(description="A text or token ids, or a list of either.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(None, description="The text before its continuation; not with `logprobs`.")
    suffix: JsonValue = Field(None, description="Not supported.")

    @property
    def asked_logprobs(self) -> int | None:
        return super().asked_logprobs if self.logprobs is None else self.logprobs


class EmbeddingRequest(Strict):
    model: str | None = Field(None, max_length=256, description="Default: the server's embedder.")
    input: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[Embedded], Field(min_length=1, max_length=256), Tag("list")],
        Discriminator(form_tag),
    ] = Field(description="A text, or a list of texts and of content parts of type text or image_url.")
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = Field(None, description="Taken, without effect.")


class TokenizeRequest(TemplateFields, SamplingFields):
    """Either a chat or a text. What only shapes an answer may be there, and changes nothing."""

    model: str | None = Field(None, max_length=256)
    messages: list[ChatMessageIn] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    text: str | None = Field(None, max_length=200_000)


class PlainTokenizeRequest(TemplateFields, SamplingFields):
    """As vLLM's and llama.cpp's: a chat, or a text by either name."""

    neutral = {
        **SamplingFields.neutral,
        **dict.fromkeys(("add_special", "parse_special", "with_pieces", "return_token_strs"), False),
    }
    model: str | None = Field(None, max_length=256)
    messages: list[ChatMessageIn] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: str | None = Field(None, max_length=200_000)
    content: str | None = Field(None, max_length=200_000)


class DetokenizeRequest(Strict):
    model: str | None = Field(None, max_length=256)
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=1_000_000)


class ImageUpload(Strict):
    image: str = Field(min_length=1, description="A data: URI with base64.")
    id: str | None = Field(None, max_length=64, description="Checked against the id that the content has.")
