"""What an answer has to match, by the names of several servers: OpenAI's, vLLM's and llama.cpp's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vlm.requests.errors import ApiError, invalid
from vlm.requests.sampling_schemas import MAX_SCHEMA_CHARS, ResponseFormat, SamplingFields

Constraint = tuple[str, str]  # (kind, text) of llm.request.SamplingParams

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_MAX_CHOICES = 1024
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


def constraint_of(body: SamplingFields) -> Constraint | None:
    """Raises ApiError 400 for one that is incomplete, wrong or given twice."""
    found = [
        (name, constraint)
        for name, constraint in (
            ("response_format", _of_format(body.response_format)),
            *((f"guided_{kind}", _guided(f"guided_{kind}", kind, body)) for kind in _KINDS[:-1]),
            ("structured_outputs", _structured(body.structured_outputs)),
            ("json_schema", _of("json_schema", "json", body.json_schema)),
        )
        if constraint is not None
    ]
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid("invalid_value", f"'{second}' can't be combined with '{first}': give one.", second)
    return found[0][1] if found else None


def _guided(name: str, kind: str, body: SamplingFields) -> Constraint | None:
    return _of(name, kind, getattr(body, name))


def _structured(given: Any) -> Constraint | None:
    """vLLM's object with one of _KINDS."""
    name = "structured_outputs"
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise invalid("invalid_value", f"'{name}' must be an object.", name)
    chosen = {kind: value for kind, value in given.items() if kind in _KINDS and value not in (None, False)}
    if len(chosen) != 1:
        raise invalid("invalid_value", f"'{name}' must have one of {', '.join(_KINDS)}.", name)
    ((kind, value),) = chosen.items()
    return _of(f"{name}.{kind}", kind, value)


def _of(name: str, kind: str, value: Any) -> Constraint | None:
    if value is None or value == "" or value == {} or value == []:
        return None
    match kind:
        case "json":
            return ("json_schema", _schema(name, value))
        case "json_object":
            return ("json_object", "")
        case "choice":
            return ("regex", _one_of(name, value))
    if not isinstance(value, str):
        raise invalid("invalid_value", f"'{name}' must be a text.", name)
    return (kind, value)


def _schema(name: str, value: Any) -> str:
    """As JSON in one line; a text is taken for JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise invalid("invalid_value", f"'{name}' is not valid JSON.", name) from None
    if not isinstance(value, Mapping):
        raise invalid("invalid_value", f"'{name}' must be a JSON schema.", name)
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_CHARS:
        raise _too_long(name)
    return text


def _one_of(name: str, value: Any) -> str:
    """A pattern of one of these texts."""
    right = isinstance(value, list) and all(isinstance(choice, str) and choice for choice in value)
    if not right or len(value) > _MAX_CHOICES:
        raise invalid("invalid_value", f"'{name}' must be a list of up to {_MAX_CHOICES} texts.", name)
    return "|".join(f"({_SPECIAL.sub(lambda found: chr(92) + found[0], choice)})" for choice in value)


def _of_format(form: ResponseFormat | None) -> Constraint | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ("json_object", "")
    if form.type == "json_schema":
        if form.json_schema is None:
            raise invalid("missing_required_parameter", "A schema is missing.", "response_format.json_schema")
        text = json.dumps(form.json_schema.schema_, separators=(",", ":"))
        if len(text) > MAX_SCHEMA_CHARS:
            raise _too_long("response_format.json_schema.schema")
        return ("json_schema", text)
    given = form.regex if form.type == "regex" else form.grammar
    if not given:
        raise invalid(
            "missing_required_parameter", "The constraint is missing.", f"response_format.{form.type}"
        )
    return (form.type, given)


def _too_long(place: str) -> ApiError:
    return invalid("invalid_value", f"The schema has more than {MAX_SCHEMA_CHARS} characters.", place)
