"""What is asked of every page: prompt, sampling and schema, and the identity of that question."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llm.request import Prompt, SamplingParams, VisualKey
from vlm.foreign.foreign_spec import ForeignSpec
from vlm.pipeline import ChatMessage, ImageInput
from vlm.prompt import ImagePart, Message
from vlm.spec import BLOCK_SIZE, ModelSpec

Order = Literal["auto", "instruction-first", "image-first"]


@dataclass(frozen=True, slots=True)
class Preset:
    prompt: str
    max_tokens: int
    schema: str = ""  # JSON schema as text; "" leaves the answer free


FIELDS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "maxLength": 24},
        "seller": {"type": "string", "maxLength": 40},
        "date": {"type": "string", "maxLength": 16},
        "total": {"type": "string", "maxLength": 16},
    },
    "required": ["kind", "seller", "date", "total"],
    "additionalProperties": False,
}

PRESETS = {
    "caption": Preset("Describe the image.", 256),
    "text": Preset("Read the text.", 1024),
    "table": Preset("Read the table and give it as Markdown.", 1024),
    "formula": Preset("Read the formula and give it as LaTeX.", 512),
    "chart": Preset("Read the chart and give its data as a table.", 1024),
    "summary": Preset("Summarize the document in one or two sentences.", 192),
    "fields": Preset(
        "Give the fields of the document as JSON.", 512, json.dumps(FIELDS_SCHEMA, separators=(",", ":"))
    ),
}


def length_prefixed_digest(*fields: str) -> str:
    """32 hex digits; ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for field in fields:
        encoded = field.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """One question for every page. `preset` is "custom" for a free prompt."""

    prompt: str
    params: SamplingParams
    preset: str = "custom"
    order: Order = "auto"
    dpi: int = 150  # of PDF pages: another resolution is another picture
    max_pixels: int = 0  # of a page that a model takes whole; 0: the default's

    @property
    def digest(self) -> str:
        """32 hex digits over all that shapes an answer, the page and the model excepted."""
        params = json.dumps(asdict(self.params), sort_keys=True, ensure_ascii=False)
        cap = (str(self.max_pixels),) if self.max_pixels else ()
        return length_prefixed_digest(self.prompt, params, self.order, str(self.dpi), *cap)

    def messages(self, image: bytes) -> list[ChatMessage]:
        """Raises ValueError while the order is still "auto"."""
        if self.order == "auto":
            raise ValueError("the order is not resolved")
        parts: tuple[str | ImageInput, ...] = (self.prompt, ImageInput(image))
        return [ChatMessage("user", parts if self.order == "instruction-first" else parts[::-1])]

    def prompt_for(self, spec: ModelSpec | ForeignSpec, side: int) -> Prompt:
        """The prompt of a square page of `side` pixels."""
        grid = spec.preprocess_spec("auto").rule.grid(side, side)
        image = ImagePart(grid, VisualKey("0" * 64))
        parts: tuple[str | ImagePart, ...] = (self.prompt, image)
        ordered = parts[::-1] if self.order == "image-first" else parts
        return spec.prompt_builder.build([Message("user", ordered)])

    def resolved(self, spec: ModelSpec | ForeignSpec) -> PageQuestion:
        """In the family's own words for the preset, where it was taught some.

        Instruction first where pages can then share its KV: it must fill a block of the prefix cache. A
        shorter one comes behind the image, the order in which most models were taught to answer.
        """
        words = None if spec.family is None else spec.family.prompts.get(self.preset)
        asked = self if words is None else replace(self, prompt=words)
        if self.order != "auto":
            return asked
        prompt = replace(asked, order="instruction-first").prompt_for(spec, 64)
        shared = words is None and prompt.spans[0].start >= BLOCK_SIZE
        return replace(asked, order="instruction-first" if shared else "image-first")


def make_question(
    *,
    preset: str | None = None,
    prompt: str | None = None,
    schema: str | None = None,
    max_tokens: int | None = None,
    order: Order = "auto",
    dpi: int = 150,
    max_pixels: int = 0,
    seed: int | None = None,
    temperature: float = 0.0,
) -> PageQuestion:
    """A preset, or a free prompt; a schema may join either. Raises ValueError with a text for the user."""
    if preset is not None and prompt is not None:
        raise ValueError("give --prompt or --preset, not both")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset}; known: {', '.join(PRESETS)}")
    if prompt is not None and not prompt.strip():
        raise ValueError("the prompt is empty")
    name = preset or ("custom" if prompt is not None else "fields" if schema is not None else "caption")
    chosen = PRESETS.get(name, PRESETS["caption"])
    text = schema if schema is not None else chosen.schema if name != "custom" else ""
    params = SamplingParams(
        max_tokens=max_tokens or chosen.max_tokens,
        temperature=temperature,
        seed=seed,
        constraint=("json_schema", text) if text else None,
    )
    return PageQuestion(prompt if prompt is not None else chosen.prompt, params, name, order, dpi, max_pixels)


def read_schema(text: str) -> str:
    """A schema file's content, checked and in one line. Raises ValueError."""
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not valid JSON: line {error.lineno}, {error.msg}") from None
    if not isinstance(schema, dict):
        raise ValueError("the schema must be a JSON object")
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
