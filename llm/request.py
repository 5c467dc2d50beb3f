"""What is asked of the engine and what it answers. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

VisualKey = NewType("VisualKey", str)
"""64 hex digits: image digest, tiling rule, detail, variant, background, encoder revision, namespace."""

Priority = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length"]


class RequestError(ValueError):
    """A request that can't be served as asked. `message` is a sentence that is safe to show a client."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions [start, start + length) show rows [offset, offset + length) of `key`'s visual tokens."""

    start: int
    length: int
    key: VisualKey
    offset: int
    shape: tuple[int, int] | None = None  # (rows, columns) of a whole image, where rope tells them apart


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with the positions that visual tokens replace; spans are sorted and disjoint."""

    token_ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
    text: str | None = None  # for an engine that makes ids of its own; they are then a lower bound of those

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_image_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    def planned_rows(self) -> dict[VisualKey, int]:
        """Visual tokens that each image must have."""
        rows: dict[VisualKey, int] = {}
        for span in self.spans:
            rows[span.key] = max(rows.get(span.key, 0), span.offset + span.length)
        return rows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = 256
    fit_max_tokens: bool = (
        False  # a default, not a client's number: fewer do where the KV cache holds no more
    )
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    beam_width: int = 1  # above 1: beam search, which excludes sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end an answer, as end tokens do
    min_tokens: int = 0  # before which no end token may come
    ignore_eos: bool = False
    logprobs: int | None = None  # None is off; k gives the chosen token and the k likeliest
    prompt_logprobs: int | None = None
    constraint: tuple[str, str] | None = (
        None  # (kind, text): ("json_schema" | "regex" | "grammar" | "json_object", ...)
    )
    skip_special_tokens: bool | None = None  # of the text; None: all but the markup that the model writes
    # A chat's answer: models learn to begin one with a space, which belongs to neither text nor constraint.
    drop_leading_space: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: Priority = "interactive"
    namespace: str = ""  # cache namespace; equal prompts in other namespaces share nothing
    chat: object = None  # what the prompt was made from, for an engine that writes prompts by itself


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    image_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds on the engine's clock; the pipeline adds what happens outside the engine."""

    preprocess_ms: float = 0.0  # header probe, prompt, decode and tiling; 0 when cached
    queue_ms: float = 0.0  # submitted to first scheduled
    encode_ms: float = 0.0  # visual tokens asked for to there; 0 when cached
    prefill_ms: float = 0.0  # first scheduled (encoding excluded) to first token
    ttft_ms: float = 0.0  # submitted to first token
    tpot_ms: float = 0.0  # mean gap after the first token
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WantVisual:
    """The engine lacks these visual tokens and nothing cached covers them: send the tiles."""

    request_id: str
    key: VisualKey


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. `text` may be empty while a UTF-8 sequence or a stop string is undecided."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice ended; `usage` and `timings` are set on the request's last one."""

    request_id: str
    choice: int
    reason: FinishReason
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; it is the request's last event. param: the field that is to blame."""

    request_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's next tokens; the first entry ever is the prompt's second token."""

    request_id: str
    logprobs: tuple[TokenLogprob, ...]


Event = WantVisual | Delta | Finished | Failed | PromptLogprobs
