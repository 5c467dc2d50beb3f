"""A request's settings -> SamplingParams, and what is refused because it can't be honoured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from llm.request import Priority, SamplingParams
from vlm.config import ServeConfig
from vlm.requests.constraints import constraint_of
from vlm.requests.errors import from_validation, invalid, unknown_model
from vlm.requests.sampling_schemas import MOST_TOKENS, SamplingFields
from vlm.requests.schemas import ChatRequest, CompletionRequest

_UNSUPPORTED = {
    "functions": "Use 'tools'.",
    "audio": "Answers are text.",
    "web_search_options": "",
    "chat_template": "The checkpoint's own is used.",
    "suffix": "",
    "grammar": "Use 'guided_grammar', in Lark's notation.",
}


def parsed_chat(fields: dict[str, Any]) -> ChatRequest:
    """A chat made of another form's request. Raises ApiError 400."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(RequestValidationError(error.errors())) from None


def check_supported(body: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError 400 for what would change the meaning of an answer if it were ignored."""
    for name, instead in _UNSUPPORTED.items():
        if getattr(body, name, None) not in (None, [], {}, False, ""):
            text = f"This server does not support '{name}'. {instead}".strip()
            raise invalid("unsupported_parameter", text, name)
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise invalid("unsupported_parameter", "'best_of' above 'n' is not supported; use 'n'.", "best_of")
    if isinstance(body, ChatRequest):
        _check_chat(body)
    elif body.echo and body.logprobs is not None:
        raise invalid("unsupported_parameter", "'echo' is not supported with 'logprobs'.", "echo")


def _check_chat(body: ChatRequest) -> None:
    if body.function_call not in (None, "none", "auto"):
        raise invalid(
            "unsupported_parameter",
            "This server does not support 'function_call'. Use 'tool_choice'.",
            "function_call",
        )
    if body.modalities and body.modalities != ["text"]:
        raise invalid("unsupported_parameter", "This server answers with text only.", "modalities")
    if body.top_logprobs and not body.logprobs:
        raise invalid("invalid_value", "'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        name = "continue_final_message"
        raise invalid("invalid_value", f"'{name}' can't be combined with 'add_generation_prompt'.", name)
    if body.continue_final_message and body.messages[-1].role != "assistant":
        name = "continue_final_message"
        raise invalid("invalid_value", f"'{name}' needs a last message of role assistant.", name)


def check_model(requested: str | None, served: str) -> None:
    if requested is not None and requested != served:
        raise unknown_model(served)


def sampling_params(body: SamplingFields, config: ServeConfig) -> SamplingParams:
    """Raises ApiError 400 for settings that contradict each other or a cap."""
    n = body.n or 1
    if n > config.max_choices:
        raise invalid("invalid_value", f"'n' is at most {config.max_choices} here.", "n")
    beam_width = body.beam_width or (n if body.use_beam_search else 1)
    if beam_width > config.max_choices:
        raise invalid("invalid_value", f"'beam_width' is at most {config.max_choices} here.", "beam_width")
    if body.stream_options is not None and not body.stream:
        raise invalid("invalid_value", "'stream_options' needs 'stream' to be true.", "stream_options")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    asked = body.asked_tokens
    max_tokens = MOST_TOKENS if asked == -1 else asked or config.default_max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        fit_max_tokens=asked in (None, -1),
        min_tokens=min(body.min_tokens or 0, max_tokens),
        temperature=body.temperature or 0.0,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        seed=body.seed,
        n=n,
        beam_width=beam_width,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens,
        logprobs=body.asked_logprobs,
        constraint=constraint_of(body),
    )


class EncodesText(Protocol):
    def encode(self, text: str, *, allow_special: bool = True, starts: bool = True) -> list[int]: ...


def without_words(params: SamplingParams, words: Sequence[str], tokenizer: EncodesText) -> SamplingParams:
    """Forbids words as they begin a text or follow a space. Raises ApiError 400 for one of several tokens."""
    forms = {
        form: tokenizer.encode(form, allow_special=False, starts=False)
        for word in words
        for form in (word, f" {word.lstrip()}")
    }
    banned = {ids[0] for ids in forms.values() if len(ids) == 1}
    for i, word in enumerate(words):
        if any(banned.isdisjoint(forms[form]) for form in (word, f" {word.lstrip()}")):
            raise invalid(
                "unsupported_parameter",
                "'bad_words' has only words of one token here; this one has several.",
                f"bad_words[{i}]",
            )
    biases = dict(params.logit_bias) | dict.fromkeys(sorted(banned), -100.0)
    return replace(params, logit_bias=tuple(biases.items()))


def priority(body: SamplingFields) -> Priority:
    return "batch" if body.service_tier in ("flex", "batch") else "interactive"
