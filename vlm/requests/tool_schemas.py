"""Tools as clients send them: what is offered, calls of earlier answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 20_000
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Strict(BaseModel):
    """Unknown fields are refused by name: an answer that silently lacks what was asked for misleads.

    neutral: fields of other servers, with the value that asks for what happens anyway.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    neutral: ClassVar[Mapping[str, JsonValue]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        """Null leaves a field open, as its neutral value does."""
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if name in cls.model_fields
            or not (value is None or (name in cls.neutral and value == cls.neutral[name]))
        }


class FunctionIn(Lenient):
    name: ToolName
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    parameters: dict[str, JsonValue] | None = Field(None, description="JSON schema of an object.")
    strict: bool | None = Field(None, description="Refuses schemas with keywords that can't be enforced.")


class ToolIn(Lenient):
    type: Literal["function"]
    function: FunctionIn


class CalledFunction(Lenient):
    name: ToolName
    arguments: str | dict[str, Any] = Field("", description="A JSON object, as a string.")


class ToolCallIn(Lenient):
    id: str = Field(min_length=1, max_length=256)
    function: CalledFunction
