"""How families write tool calls in their answers.

A call is written as its family's chat template writes one, found by rendering a call with it. Where the
template has no form that is known here, tools are described in a message (`vlm.tools.spelling`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from llm.decoder_config import ConfigError
from llm.request import RequestError
from vlm.tools.calls import Call, Tool


@dataclass(frozen=True)
class CallForm:
    """An answer with calls is: text, `trigger`, `opening`, a call, for each further one `between` and a call,
    `ending`. A call is `before_name`, its name, `before_arguments`, a JSON object, `after_arguments`."""

    name: str
    before_name: str
    before_arguments: str
    after_arguments: str
    trigger: str = ""  # "": an answer with a call is that call alone
    opening: str = ""
    between: str = ""
    ending: str = ""
    can_repeat: bool = True
    is_native: bool = True  # the chat template itself shows tools, calls and results
    id_chars: int | None = None  # of calls' ids; templates may refuse others
    specials: Mapping[str, int] = field(default_factory=dict)  # tokens of it that add nothing to a text

    def head(self, tool_name: str) -> str:
        return f"{self.before_name}{tool_name}{self.before_arguments}"

    def call(self, tool_name: str, arguments: Mapping[str, Any]) -> str:
        spelled = json.dumps(arguments, ensure_ascii=False)
        return f"{self.head(tool_name)}{spelled}{self.after_arguments}"

    def described(self, call: Call) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": call.name, "arguments": dict(call.arguments)}
        return {"type": "function", "id": self.call_id(call.id), "function": function}

    def call_id(self, client_id: str) -> str:
        """A call's id as the template takes it: equal for equal ids, letters and digits."""
        digest = hashlib.sha256(client_id.encode("utf-8", "replace")).hexdigest()
        return digest[: self.id_chars or 24]

    def pieces(self, literal: str) -> list[str | int]:
        """A literal of the form as texts and ids of special tokens."""
        if not self.specials:
            return [literal] if literal else []
        pattern = f"({'|'.join(map(re.escape, self.specials))})"
        return [self.specials.get(piece, piece) for piece in re.split(pattern, literal) if piece]

    def shown(self, literal: str) -> str:
        """A literal of the form as an answer's text shows it."""
        return "".join(piece for piece in self.pieces(literal) if isinstance(piece, str))


HERMES = CallForm(
    "hermes",
    before_name='\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    trigger="<tool_call>",
    between="\n<tool_call>",
)
MISTRAL = CallForm(
    "mistral",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    trigger="[TOOL_CALLS]",
    opening="[",
    between=", ",
    ending="]",
    id_chars=9,
)
LLAMA = CallForm(
    "llama",
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    can_repeat=False,
)
KNOWN_FORMS = (HERMES, MISTRAL, replace(MISTRAL, opening=" ["), LLAMA)
SPELLED_OUT = replace(HERMES, is_native=False)


class Renderer(Protocol):
    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        placeholder: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...

    def special_tokens(self) -> Sequence[str]: ...

    def token_id(self, token: str) -> int: ...


def form_of(tokenizer: Renderer) -> CallForm:
    """The form of the tokenizer's chat template; where it has none, the one that is spelled out."""
    shown = _probed(tokenizer)
    form = next((form for form in KNOWN_FORMS if _is_shown(form, shown)), SPELLED_OUT)
    literals = "\n".join((form.trigger, form.opening, form.after_arguments, form.between, form.ending))
    specials = [token for token in tokenizer.special_tokens() if token and token in literals]
    return replace(form, specials={token: tokenizer.token_id(token) for token in specials})


_PROBE = Tool("probe_tool", "Probes.", {"type": "object", "properties": {"probe_key": {"type": "string"}}})
_PROBE_ARGUMENTS = {"probe_key": "probe value"}
_PROBE_RESULT = "probe result"


def _is_shown(form: CallForm, text: str) -> bool:
    # what follows the arguments may differ: Mistral's writes ids of calls that were made, of none to be made
    written = form.call(_PROBE.name, _PROBE_ARGUMENTS).removesuffix(form.after_arguments)
    return form.trigger + form.opening + written in text


def _probed(tokenizer: Renderer) -> str:
    """A chat with a call, rendered; nothing where the template leaves out a tool, its call or its result."""
    call_id = "probe0000"  # nine characters: Mistral's templates refuse others
    function = {"name": _PROBE.name, "arguments": _PROBE_ARGUMENTS}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": _text("probe")},
        {
            "role": "assistant",
            "content": _text(""),
            "tool_calls": [{"type": "function", "id": call_id, "function": function}],
        },
        {"role": "tool", "content": _text(_PROBE_RESULT), "tool_call_id": call_id, "name": _PROBE.name},
    ]
    try:
        shown = tokenizer.render(messages, placeholder="", tools=[_PROBE.described()])
    except (RequestError, ConfigError):
        return ""
    is_whole = _PROBE.description in shown and _PROBE_RESULT in shown and shown.count(_PROBE.name) > 1
    return shown if is_whole else ""


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
