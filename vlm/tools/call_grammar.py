"""The grammar of an answer with tools: text, or calls whose arguments follow their tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llm.constraints.grammar import JSON_OPTIONS
from llm.request import RequestError
from vlm.tools.calls import Tool, ToolUse
from vlm.tools.forms import CallForm

_ANY_TEXT = "/(?s:.*)/"
# As models have learnt to write JSON: the separators of Python's `json`, and no white space of their own.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("enum", "const"))
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)  # what would end a regular expression in Lark
_ESCAPES = {"/": r"\/", "\n": r"\n"}


def grammar(use: ToolUse, form: CallForm, answer: str | None = None) -> str:
    """Lark, as llguidance reads it. `answer`: a term for an answer without calls; any text by default.

    Raises RequestError for a tool whose parameters are no object.
    """
    calls = f"{_literal(form, form.opening)} call{_more(use, form)} {_literal(form, form.ending)}"
    lines = [f"start: {_start(use, form, calls, answer)}"]
    if use.must_call:
        pass
    elif answer is not None:
        lines.append(f"answer: {answer}")
    elif form.trigger:
        lines += _text_and_trigger(form)
    else:
        lines.append(f"TEXT: {_ANY_TEXT} & ~/{_heads(use, form)}(?s:.*)/")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(use.tools))))
    for index, tool in enumerate(use.tools):
        schema = json.dumps(arguments_schema(tool), separators=(",", ":"))
        lines.append(f"call_{index}: HEAD_{index} %json {schema} {_literal(form, form.after_arguments)}")
        lines.append(f"HEAD_{index}: {json.dumps(form.head(tool.name))}")
    return "\n".join(lines) + "\n"


def answer_term(constraint: tuple[str, str] | None) -> str | None:
    """A constraint of an answer as a term for `grammar`. Raises RequestError for a grammar, which is none."""
    match constraint:
        case None:
            return None
        case ("json_object", _):
            return _json_term({"type": "object"})
        case ("json_schema", text):
            return _json_term(json.loads(text))
        case ("regex", text):
            escaped = _SLASH.sub(lambda found: _ESCAPES.get(found[0], found[0]), text)
            return f"/{escaped}/"
    raise RequestError(
        "invalid_value", "A grammar as 'response_format' can't be combined with 'tools'.", "response_format"
    )


def _json_term(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, separators=(",", ":"))


def _start(use: ToolUse, form: CallForm, calls: str, answer: str | None) -> str:
    if use.must_call:
        return f"{_literal(form, form.trigger)} {calls}"
    if answer is not None:
        return f"answer | {_literal(form, form.trigger)} {calls}"
    return f"TEXT | text_and_trigger {calls}" if form.trigger else f"TEXT | {calls}"


def _text_and_trigger(form: CallForm) -> Iterator[str]:
    yield f"TEXT: {_ANY_TEXT}"
    if form.trigger in form.specials:
        yield f"text_and_trigger: TEXT {_literal(form, form.trigger)}"
    else:
        yield f"text_and_trigger[lazy]: TEXT {json.dumps(form.trigger)}"


def _more(use: ToolUse, form: CallForm) -> str:
    most = use.most_calls if form.can_repeat else 1
    return f" ({_literal(form, form.between)} call){{0,{most - 1}}}" if most > 1 else ""


def _heads(use: ToolUse, form: CallForm) -> str:
    """A regular expression of how calls begin: text that begins so would be read as one."""
    names = "|".join(tool.name for tool in use.tools)
    return f"{re.escape(form.before_name)}({names}){re.escape(form.before_arguments)}".replace("/", r"\/")


def _literal(form: CallForm, literal: str) -> str:
    pieces = form.pieces(literal)
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that a call's arguments follow. Raises RequestError for parameters that are no object."""
    schema = dict(tool.parameters) or {"properties": {}}
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"type": "object", **schema}
    if schema.get("type", "object") != "object":
        raise RequestError(
            "invalid_value", f"The parameters of tool '{tool.name}' are not of type object.", "tools"
        )
    return {**_narrowed(schema), "x-guidance": {**_SPACING, "lenient": not tool.strict}}


def _narrowed(schema: Any, *, closed: bool = True) -> Any:
    """Without annotations, which constrain nothing, and closed where it names properties and does not say
    whether there are others: a model would have to invent them."""
    if not isinstance(schema, Mapping):
        return schema
    narrowed: dict[str, Any] = {}
    closed = closed and "allOf" not in schema
    for key, value in schema.items():
        if key in _VALUES:
            narrowed[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            narrowed[key] = {name: _narrowed(inner, closed=closed) for name, inner in value.items()}
        elif isinstance(value, list):
            narrowed[key] = [_narrowed(inner, closed=closed and key != "allOf") for inner in value]
        elif key not in _ANNOTATIONS:
            narrowed[key] = _narrowed(value, closed=closed)
    others = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
    if closed and "properties" in narrowed and not others & narrowed.keys():
        narrowed["additionalProperties"] = False
    return narrowed
