"""The words of tool use: tools that are offered, calls that were made, and how many a request allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_CALLS = 16  # in one answer


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of an object; `strict`: no keyword of it
    may be left out of account."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an earlier answer."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request offers. `must_call`: the answer is calls and nothing else."""

    tools: tuple[Tool, ...]
    must_call: bool = False
    most_calls: int = MOST_CALLS
