"""A chat request's settings -> SamplingParams, and what is refused because it can't be honoured."""

from __future__ import annotations

import json

from llm.request import Priority, SamplingParams
from vlm.config import ServeConfig
from vlm.requests.errors import invalid, unknown_model
from vlm.requests.schemas import MAX_SCHEMA_CHARS, ChatRequest, ResponseFormat

_CONSTRAINTS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "json_schema", "grammar"),
)
_UNSUPPORTED = (
    *("functions", "audio", "web_search_options"),
    *("min_tokens", "stop_token_ids", "bad_words", "chat_template", "continue_final_message"),
    *_CONSTRAINTS,
)


def check_supported(body: ChatRequest) -> None:
    """Raises ApiError 400 for what would change the meaning of an answer if it were ignored."""
    for name in _UNSUPPORTED:
        if getattr(body, name) not in (None, [], {}, False, ""):
            instead = " Use 'response_format'." if name in _CONSTRAINTS else ""
            instead = " Use 'tools'." if name == "functions" else instead
            raise invalid("unsupported_parameter", f"This server does not support '{name}'.{instead}", name)
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
    if body.top_logprobs and not body.logprobs:
        raise invalid("invalid_value", "'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("invalid_value", "'stream_options' needs 'stream' to be true.", "stream_options")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    max_tokens = body.max_completion_tokens or body.max_tokens
    return SamplingParams(
        max_tokens=max_tokens or config.default_max_tokens,
        fit_max_tokens=max_tokens is None,
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
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=_constraint(body.response_format),
    )


def _constraint(form: ResponseFormat | None) -> tuple[str, str] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ("json_object", "")
    if form.type == "json_schema":
        if form.json_schema is None:
            raise invalid("missing_required_parameter", "A schema is missing.", "response_format.json_schema")
        text = json.dumps(form.json_schema.schema_, separators=(",", ":"))
        if len(text) > MAX_SCHEMA_CHARS:
            raise invalid(
                "invalid_value",
                f"The schema has more than {MAX_SCHEMA_CHARS} characters.",
                "response_format.json_schema.schema",
            )
        return ("json_schema", text)
    given = form.regex if form.type == "regex" else form.grammar
    if not given:
        raise invalid(
            "missing_required_parameter", "The constraint is missing.", f"response_format.{form.type}"
        )
    return (form.type, given)


def priority(body: ChatRequest) -> Priority:
    return "batch" if body.service_tier in ("flex", "batch") else "interactive"
