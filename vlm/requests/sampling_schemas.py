"""How an answer is made and what it has to match: the fields of every request for one, with their caps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator

from vlm.requests.tool_schemas import Lenient, Strict

MAX_STOP_CHARS = 256
MAX_STOPS = 4
MAX_SCHEMA_CHARS = 100_000
MOST_TOKENS = 1_000_000

# Fields of other servers that ask, with these values, for what happens anyway
_NEUTRAL: dict[str, JsonValue] = {
    "add_special_tokens": False,
    "cache_prompt": True,
    "early_stopping": False,
    "echo": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "parse_tool_calls": True,
    "priority": 0,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "typical_p": 1.0,
    "verbosity": "medium",
    "reasoning_effort": "none",
}


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


def form_tag(value: Any) -> str:
    """One form is named in an error, the one that was sent."""
    return "list" if isinstance(value, list) else "string"


Stop = Annotated[
    Annotated[StopString, Tag("string")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("list")],
    Discriminator(form_tag),
]


class SamplingFields(Strict):
    neutral = _NEUTRAL
    max_tokens: int | None = Field(
        None, ge=-1, le=MOST_TOKENS, description="-1: as many as fit, as in llama.cpp."
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
    bad_words: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = Field(
        None, max_length=256, description="vLLM's name: words of one token each that are not said."
    )
    user: str | None = Field(None, description="Taken, without effect.")
    metadata: JsonValue = Field(None, description="Taken, without effect.")
    store: JsonValue = Field(None, description="Taken, without effect: no chat is stored.")
    safety_identifier: str | None = Field(None, description="Taken, without effect.")
    prompt_cache_key: str | None = Field(None, description="Taken, without effect.")
    prompt_cache_retention: str | None = Field(None, description="Taken, without effect.")
    prediction: JsonValue = Field(None, description="Taken, without effect: a hint for speed.")
    request_id: str | None = Field(None, description="Taken, without effect: see `x-request-id`.")

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """Likeliest tokens beside each chosen one; None: no log-probabilities."""
        return self.n_probs or None

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
