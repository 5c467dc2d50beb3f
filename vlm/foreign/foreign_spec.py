"""What the serving side knows of a model that transformers runs: its template and tokenizer, no more.

An image goes to the engine at its own size, where the checkpoint's processor makes of it what it will; how
many tokens that comes to is known when the answer is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llm.cost import CostError, DecoderShape, kv_bytes, kv_element_bytes
from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from llm.storage import KvStorage
from llm.text.chat_template import joined
from llm.text.tokenizer import Tokenizer
from llm.text_config import ConfigError, read_json_object
from preprocess.own_size import AreaResize
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.types import Detail, TileGrid
from vlm.model_source import ModelSource, naming
from vlm.prompt import PLAIN, ImagePart, Message, Piece, PromptBuilder, Rendering, Rows

_KEY_VERSION = "foreign-1"
_DEFAULT_CONTEXT = 4096  # tokens, where neither config nor tokenizer names any
_UNCHANGED = AreaResize(factor=1, min_pixels=1, max_pixels=1 << 40)
UNKNOWN_COST = (
    "What an image costs can't be told ahead for this model: its own processor decides, in transformers."
)


@dataclass(frozen=True, slots=True)
class OneToken:
    """`vlm.prompt.ImageFormat` of images whose tokens are counted elsewhere."""

    placeholder: str
    row_id: int = 0

    def pieces(self, grid: TileGrid, index: int, num_images: int) -> list[Piece]:
        return [Rows(1, 0)]


@dataclass(frozen=True, slots=True)
class OwnGeometry:
    """One token an image, which stands for those that the processor makes."""

    tokens_per_tile: int = 0

    def rows(self, grid: TileGrid) -> int:
        return 1


class ForeignPromptBuilder(PromptBuilder):
    """Prompts as text, for the checkpoint's own processor."""

    def __init__(self, tokenizer: Tokenizer, placeholder: str) -> None:
        super().__init__(tokenizer, OneToken(placeholder))
        self._has_template = tokenizer.has_template
        self._placeholder = placeholder

    def build(self, messages: list[Message], rendering: Rendering = PLAIN) -> Prompt:  # type: ignore[override]
        """Token ids are those of the text, one for each image before them. Raises `RequestError`."""
        self._check(messages, rendering)
        text = self._quoting.unquoted(self._rendered(messages, rendering))
        if text is None:
            raise RequestError(
                "invalid_request",
                "A text spells a special token of this model, which transformers would take for one.",
                "messages",
            )
        keys = [part.key for message in messages for part in message.content if isinstance(part, ImagePart)]
        ids = (0,) * len(keys) + tuple(self._tokenizer.encode(text))
        return Prompt(ids, tuple(ImageSpan(i, 1, key, 0) for i, key in enumerate(keys)), text)

    def plain(self, text: str | Sequence[int]) -> Prompt:
        """Raises `RequestError` for tokens: transformers makes its own of the text."""
        if not isinstance(text, str):
            raise RequestError(
                "unsupported_parameter", "A prompt of this model is a text: transformers runs it."
            )
        if self._placeholder in text or not text:
            raise RequestError(
                "invalid_value", "The prompt must have a text, and none that stands for images."
            )
        return Prompt(tuple(self._tokenizer.encode(text)), text=text)

    def _check(self, messages: list[Message], rendering: Rendering) -> None:
        if rendering.tools:
            raise RequestError(
                "unsupported_parameter", "'tools' is not available: transformers runs this model.", "tools"
            )
        self.check_length(messages, rendering)

    def _rendered(self, messages: list[Message], rendering: Rendering) -> str:  # type: ignore[override]
        """By the template; without one, all images and then all texts, as models without chats are taught."""
        if self._has_template:
            return super()._rendered(messages, rendering)
        if rendering.variables:
            raise RequestError(
                "unsupported_parameter", "This model has no chat template.", "chat_template_kwargs"
            )
        described = [self._described(message) for message in messages]
        images = sum(isinstance(part, ImagePart) for message in messages for part in message.content)
        texts = [str(joined(item["content"], "")) for item in described]
        return self._placeholder * images + "\n".join(texts)


@dataclass(frozen=True)
class ForeignSpec:
    """`vlm.spec.ModelSpec` of a model that transformers runs."""

    name: str
    source: ModelSource
    tokenizer: Tokenizer
    config: dict[str, Any]
    kv: KvStorage = "float32"
    family: None = None
    geometry: OwnGeometry = OwnGeometry()

    @classmethod
    def load(cls, source: ModelSource, kv: KvStorage = "float32") -> ForeignSpec:
        """Raises ConfigError, with the directory, where config.json or tokenizer.json can't be read."""
        with naming(source.directory):
            config = read_json_object(source.directory / "config.json")
            return cls(source.name, source, Tokenizer.from_directory(source.directory), config, kv)

    @property
    def directory(self) -> Path:
        return self.source.directory

    @cached_property
    def revision(self) -> str:
        """64 hex digits: names, sizes and times of the checkpoint's files."""
        files = sorted(path for path in self.directory.iterdir() if path.is_file())
        listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    @cached_property
    def context_length(self) -> int:
        parts = [self.config.get(name) for name in ("text_config", "llm_config", "language_config")]
        for part in (*parts, self.config):
            found = part.get("max_position_embeddings") if isinstance(part, dict) else None
            if isinstance(found, int) and found > 0:
                return found
        return _DEFAULT_CONTEXT

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def preprocess_spec(self, detail: Detail, num_images: int = 1) -> PreprocessSpec:
        """Raises RequestError for a detail that is asked for."""
        if detail != "auto":
            raise RequestError(
                "unsupported_parameter", "'detail' is not available: transformers runs this model.", "detail"
            )
        return PreprocessSpec(_UNCHANGED, variant="exact")

    def visual_key(self, digest: str, spec: PreprocessSpec, namespace: str = "") -> VisualKey:
        fields = (_KEY_VERSION, tiles_key(digest, spec), self.revision, namespace)
        return VisualKey(hashlib.sha256("\0".join(fields).encode()).hexdigest())

    @cached_property
    def prompt_builder(self) -> ForeignPromptBuilder:
        return ForeignPromptBuilder(self.tokenizer, self._placeholder)

    @property
    def _placeholder(self) -> str:
        """The special token that stands for an image in a text."""
        for name in ("image_token", "image_token_id", "image_token_index"):
            found = self.config.get(name)
            if isinstance(found, int) and (token := self.tokenizer.token(found)):
                return token
        return next((token for token in ("<image>", "<|image|>") if token in self._specials), "<image>")

    @property
    def _specials(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.special_tokens())

    def image_prompt_tokens(self, grid: TileGrid) -> int:
        """Raises RequestError: the processor knows, once it has the pixels."""
        raise RequestError("cost_unknown", UNKNOWN_COST, "messages")

    def kv_bytes(self, num_tokens: int) -> int:
        """0 where the config's decoder is of no known shape."""
        try:
            shape = DecoderShape.from_config(self.config)
        except (CostError, ConfigError, ValueError, TypeError, KeyError):
            return 0
        return int(kv_bytes(shape, num_tokens, kv_element_bytes(self.kv, shape.head_dim)))
