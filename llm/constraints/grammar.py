"""Constraints as llguidance grammars: what is refused before compiling, and the compiling itself.

No numpy here: the process that tries constraints first imports this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from llm.request import RequestError

KINDS = ("json_schema", "json_object", "regex", "grammar")

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# One space at most wherever JSON allows whitespace: some models never stop once they may indent.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": " ", "lenient": False}


class GrammarError(RequestError):
    """A constraint that can't be used."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_constraint", message, "response_format")


class GrammarDeadline(GrammarError):
    """A constraint that was not compiled in time."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    max_chars: int = 65_536
    max_depth: int = 64  # of brackets in JSON, of parentheses elsewhere
    deadline_s: float = 3.0  # to compile one, on an idle core 1 to 100 ms
    max_cached: int = 64  # compiled grammars kept
    max_uses: int = 16  # requests of one; what they explore adds to it, and they share llguidance's limits


def check_text(kind: str, text: str, limits: GrammarLimits) -> None:
    """Raises GrammarError for what is refused unread: unknown kind, too long, too deep, no JSON object."""
    if kind not in KINDS:
        raise GrammarError(f"The constraint must be one of {', '.join(KINDS)}.")
    if len(text) > limits.max_chars:
        raise GrammarError(f"The constraint has {len(text)} characters, the limit is {limits.max_chars}.")
    if _depth(kind, text) > limits.max_depth:
        raise GrammarError(f"The constraint is nested deeper than {limits.max_depth} levels.")
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except ValueError:
            raise GrammarError("The schema is not JSON.") from None
        if not isinstance(schema, dict):
            raise GrammarError("The schema is not a JSON object.")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint at its start, first masks computed."""

    matcher: LLMatcher
    spaced: LLMatcher | None  # before a space that the constraint follows; None without a token for it


class Compiler:
    """Constraints over one vocabulary. `vocabulary[i]`: the bytes that token i adds to the text; b"" for
    tokens never allowed. End tokens add none."""

    def __init__(self, vocabulary: tuple[bytes, ...], eos_ids: Iterable[int]) -> None:
        eos_ids = sorted(eos_ids)
        vocabulary = tuple(b"" if i in eos_ids else token for i, token in enumerate(vocabulary))
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(vocabulary, eos_ids[0])), eos_token=eos_ids)
        self._space_id = vocabulary.index(b" ") if b" " in vocabulary else None

    def compile(self, kind: str, text: str) -> Compiled:
        """Raises GrammarError.

        Work is bounded by llguidance's own counters, but recursion is not: a chain of references can
        overflow the stack and end the process. Only for texts that the sandbox has survived.
        """
        grammar = _grammar(kind, text)
        if self._space_id is None:
            return Compiled(self._start([grammar]), None)
        spaced = self._start([{"name": "start", "lark_grammar": f'start: " " @{grammar["name"]}'}, grammar])
        matcher = spaced.deep_copy()
        matcher.consume_token(self._space_id)
        return Compiled(_checked(matcher), spaced)

    def _start(self, grammars: list[dict[str, Any]]) -> LLMatcher:
        source = json.dumps({"grammars": grammars})
        return _checked(LLMatcher(self.tokenizer, source, log_level=0, limits=_parser_limits()))


def _grammar(kind: str, text: str) -> dict[str, Any]:
    """llguidance's form of a constraint, with a name that others may refer to."""
    if kind == "grammar":
        return {"name": "constraint", "lark_grammar": text}
    if kind == "regex":
        source = LLMatcher.grammar_from_regex(text)
    else:
        schema = text if kind == "json_schema" else '{"type": "object"}'
        try:
            source = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        except ValueError:
            raise GrammarError("The schema is not understood.") from None
    (grammar,) = json.loads(source)["grammars"]
    return {**grammar, "name": "constraint"}


def _checked(matcher: LLMatcher) -> LLMatcher:
    """With its first mask computed. Raises GrammarError."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return matcher


def _parser_limits() -> LLParserLimits:
    """Below llguidance's defaults where one stream could hold up the others (14,000 units of step fuel
    and 20,000 items are about 1 ms each) or fill memory (1 to 2 kB a state)."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    """The library's first line, which quotes nothing but the client's own constraint."""
    line = error.strip().splitlines()[0] if error.strip() else "not supported"
    if line == "NoExtensionBias":  # llguidance's word for it
        line = "no text can match it"
    return f"The constraint was refused: {''.join(c for c in line if c.isprintable())[:200].rstrip('.')}."


def _depth(kind: str, text: str) -> int:
    is_json = kind.startswith("json")
    opening, closing = ("[{", "]}") if is_json else ("(", ")")
    depth = deepest = 0
    for char in (_JSON_STRING if is_json else _ESCAPED).sub("", text):
        if char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing:
            depth -= 1
    return deepest


class _Vocabulary:
    """What llguidance's TokenizerWrapper reads."""

    def __init__(self, tokens: tuple[bytes, ...], eos_id: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.special_token_ids = [i for i, token in enumerate(tokens) if not token]
        self._ids = {token: i for i, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest match from the left; bytes that no token spells are left out."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        start = 0
        while start < len(data):
            end = min(start + self._longest, len(data))
            while end > start + 1 and data[start:end] not in self._ids:
                end -= 1
            if data[start:end] in self._ids:
                ids.append(self._ids[data[start:end]])
            start = end
        return ids
