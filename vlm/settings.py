"""How settings are checked: each beside its type in the dataclass that declares it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class SettingsError(ValueError):
    """A setting that is unknown or out of range; the message names it and what is accepted."""


@dataclass(frozen=True, slots=True)
class Between:
    """Both ends included."""

    low: float
    high: float

    def accepts(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Form:
    """A text of a form; `shown` completes the sentence "the setting is ..."."""

    pattern: str
    shown: str
    is_secret: bool = False  # a wrong value is not repeated

    def accepts(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: type
    choices: tuple[Any, ...]  # of a Literal; empty: any
    limits: tuple[Between | Form, ...]

    @property
    def is_secret(self) -> bool:
        return any(isinstance(limit, Form) and limit.is_secret for limit in self.limits)

    def problem(self, value: Any) -> str | None:
        """What is accepted instead of `value`."""
        if self.choices:
            return None if value in self.choices else self.accepted
        is_number = self.kind is float and type(value) is int
        if type(value) is not self.kind and not is_number:
            return _KINDS[self.kind]
        return next((str(limit) for limit in self.limits if not limit.accepts(value)), None)

    @property
    def accepted(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        return ", ".join(map(str, self.limits)) or _KINDS[self.kind]


@lru_cache
def _rules(cls: type) -> dict[str, _Rule]:
    rules = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        limits = tuple(
            extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Between | Form)
        )
        plain = get_args(hint)[0] if limits else hint
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        rules[name] = _Rule(type(choices[0]) if choices else plain, choices, limits)
    return rules


def accepted(cls: type, name: str) -> str:
    """What a setting may be, in words."""
    return _rules(cls)[name].accepted


def from_text(cls: type, name: str, text: str) -> Any:
    """A setting's value as a variable of the environment writes it; what fits none stays a text, to be
    refused."""
    kind = _rules(cls)[name].kind
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


def is_secret(cls: type, name: str) -> bool:
    """Whether a setting's value may hold a password."""
    return _rules(cls)[name].is_secret


def bounds(cls: type, name: str) -> Between:
    """Of a numeric setting."""
    (limit,) = (limit for limit in _rules(cls)[name].limits if isinstance(limit, Between))
    return limit


class Checked:
    """Base of config dataclasses: none can be made, or changed by `replace`, that breaks a field's rule."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises `SettingsError` with every setting that is wrong."""
        cls: type = type(self)
        found = []
        for name, rule in _rules(cls).items():
            value = getattr(self, name)
            if accepted := rule.problem(value):
                found.append(
                    f"{name} must be {accepted}" + ("" if rule.is_secret else f", not {value!r:.80}")
                )
        if found:
            raise SettingsError("; ".join(found))


def from_mapping(cls: type[T], values: dict[str, Any]) -> T:
    """A config of dataclass `cls`. Raises `SettingsError` naming unknown keys and wrong values."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known)
    if unknown:
        raise SettingsError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return cls(**values)
