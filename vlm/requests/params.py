"""A chat request's settings -> SamplingParams, and what is refused because it can't be honoured."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from llm.request import Priority, SamplingParams
from vlm.config import ServeConfig
from vlm.requests.constraints import constraint_of
from vlm.requests.errors import from_validation, invalid, unknown_model
from vlm.requests.schemas import MOST_TOKENS, ChatRequest

_UNSUPPORTED = {
    "functions": "Use 'tools'.",
    "audio": "Answers are text.",
    "web_search_options": "",
    "bad_words": "Use 'logit_bias'.",
    "chat_template": "The checkpoint's own is used.",
    "continue_final_message": "",
    "grammar": "Use 'guided_grammar', in Lark's notation.",
}


def parsed_chat(fields: dict[str, Any]) -> ChatRequest:
    """A chat made of another form's request. Raises ApiError 400."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(RequestValidationError(error.errors())) from None


def check_supported(body: ChatRequest) -> None:
    """Raises ApiError 400 for what would change the meaning of an answer if it were ignored."""
    for name, instead in _UNSUPPORTED.items():
        if getattr(body, name) not in (None, [], {}, False, ""):
            text = f"This server does not support '{name}'. {instead}".strip()
            raise invalid("unsupported_parameter", text, name)
    if body.function_call not in (None, "none", "auto"):
        raise invalid(
            "unsupported_parameter",
            "This server does not support 'function_call'. Use 'tool_choice'.",
            "function_call",
        )
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise invalid("unsupported_parameter", "'best_of' above 'n' is not supported; use 'n'.", "best_of")
    if body.modalities and body.modalities != ["text"]:
        raise invalid("unsupported_parameter", "This server answers with text only.", "modalities")


def check_model(requested: str | None, served: str) -> None:
    if requested is not None and requested != served:
        raise unknown_model(served)


def sampling_params(body: ChatRequest, config: ServeConfig) -> SamplingParams:
    """Raises ApiError 400 for settings that contradict each other or a cap."""
    n = body.n or 1
    if n > config.max_choices:
        raise invalid("invalid_value", f"'n' is at most {config.max_choices} here.", "n")
    beam_width = body.beam_width or (n if body.use_beam_search else 1)
    if beam_width > config.max_choices:
        raise invalid("invalid_value", f"'beam_width' is at most {config.max_choices} here.", "beam_width")
    logprobs = (body.top_logprobs or 0) if body.logprobs else body.n_probs or None
    if body.top_logprobs and not body.logprobs:
        raise invalid("invalid_value", "'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("invalid_value", "'stream_options' needs 'stream' to be true.", "stream_options")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    asked = body.max_completion_tokens or body.max_tokens
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
        logprobs=logprobs,
        constraint=constraint_of(body),
    )


def priority(body: ChatRequest) -> Priority:
    return "batch" if body.service_tier in ("flex", "batch") else "interactive"
