"""Renders a checkpoint's chat template in a sandbox, as transformers' `apply_chat_template` does.

A template is the checkpoint's: it may compute text and nothing else, within limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from llm.decoder_config import ConfigError
from llm.request import RequestError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 4 * 1024 * 1024
MAX_REPEATED = 100_000

_PROBE = "probe text of one part"


class _Refused(TemplateError):
    """The template itself called raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses `'a' * 10**9` and towers of powers before they are computed."""
        if operator == "**" and not (abs(left) <= MAX_REPEATED and abs(right) <= 64):
            raise SecurityError("power too large")
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, list, tuple)) and isinstance(count, int)
            if repeats and len(sequence) * count > MAX_REPEATED:
                raise SecurityError("repetition too long")
        return super().call_binop(context, operator, left, right)


def _raise(message: object) -> None:
    raise _Refused(str(message))


_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # whatever a caller's variables are


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escapes no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens as variables (`bos_token`, ...).

    Raises ConfigError when the template is too long or not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError("the chat template is too long")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        }
        environment.globals.update(functions)
        try:
            self._template = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError:
            raise ConfigError("the chat template is not valid Jinja") from None
        self._variables = dict(variables)
        self._readable = read - {*variables, *functions, *_GIVEN}
        self._reads_parts = self._probe()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        placeholder: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Messages are {role, content}; content is a string or a list of {"type": "text", "text": ...} and
        {"type": "image"} parts, which templates of text decoders get joined into one string, `placeholder`
        for each image. Answers may have `tool_calls`, and results `tool_call_id` and `name`.

        tools: {"type": "function", "function": {name, description, parameters}}; variables: what else the
        template may read, such as `enable_thinking`.

        Raises RequestError when the template refuses the chat or its text grows over the limit.
        """
        if not self._reads_parts:
            messages = [
                {**message, "content": joined(message.get("content"), placeholder)} for message in messages
            ]
        if unknown := sorted((variables or {}).keys() - self._readable):
            readable = ", ".join(sorted(self._readable)) or "none"
            raise RequestError(
                "unsupported_parameter",
                f"The model's chat template does not read {unknown[0]!r:.80}. It reads: {readable:.500}.",
                "chat_template_kwargs",
            )
        try:
            return self._render(messages, add_generation_prompt, tools, variables or {})
        except _Refused as error:
            reason = "".join(c for c in str(error) if c.isprintable())[:200]
            raise RequestError("invalid_request", f"The chat template refuses this chat: {reason}") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            raise RequestError("invalid_request", "The chat template can't render this chat.") from None

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        pieces, length = [], 0
        given = {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        for piece in self._template.generate({**(variables or {}), **self._variables, **given}):
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise SecurityError("rendered text too long")
            pieces.append(piece)
        return "".join(pieces)

    def _probe(self) -> bool:
        """Whether the template walks content parts (a VLM's does) or prints content as it is."""
        try:
            shown = self._render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}], False)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return False
        return _PROBE in shown and "'type'" not in shown and '"type"' not in shown


def joined(content: object, placeholder: str) -> object:
    """A list of parts as one string, with `placeholder` for each image; anything else as it is."""
    if not isinstance(content, (list, tuple)):
        return content
    return "".join(
        str(part.get("text", "")) if part.get("type") == "text" else placeholder for part in content
    )
