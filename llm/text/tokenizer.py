"""Text to token ids and back, from a checkpoint's tokenizer.json.

Reference: transformers' fast tokenizer of the same directory, whose ids, decoded text and chat prompts
it reproduces. Never adds BOS or EOS by itself: chat templates write theirs.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from llm.decoder_config import ConfigError, read_json_object
from llm.text.chat_template import ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LONG_TEXT = 4096  # characters
_SPACE = "\u2581"  # SentencePiece's visible space

Markup = Callable[[Collection[str]], Collection[str]]
"""Of a vocabulary's special tokens, those that are content: parts of answers, and anyone's to write."""


class Tokenizer:
    """Immutable once made; safe to share between threads."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        template: ChatTemplate | None = None,
        eos_ids: frozenset[int] = frozenset(),
        markup: Markup = lambda specials: (),
    ) -> None:
        self._parsing, self._literal = _pair(tokenizer_json)
        inner = _without_first_prefix(tokenizer_json)
        self._inner = (self._parsing, self._literal) if inner is None else _pair(inner)
        self._template = template
        self.eos_ids = eos_ids
        self._added = self._parsing.get_added_tokens_decoder()
        specials = {i: token.content for i, token in self._added.items() if token.special}
        self.markup = frozenset(markup(specials.values()))
        self._skipped = {
            None: frozenset(i for i, content in specials.items() if content not in self.markup),
            True: frozenset(specials),
            False: frozenset[int](),
        }
        self._kind = _byte_kind(self._parsing)
        self.strips_first_space = _strips_first_space(self._parsing)
        self._spelled = tuple(self._spelling(i) for i in range(self._parsing.get_vocab_size()))

    @classmethod
    def from_directory(
        cls, directory: Path | str, markup: Markup = lambda specials: (), split: str = ""
    ) -> Tokenizer:
        """`split`: a pattern of words in the place of the file's own, for families whose files have a wrong
        one. Raises ConfigError when tokenizer.json is missing or not understood."""
        directory = Path(directory)
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ConfigError("the checkpoint has no readable tokenizer.json") from None
        if split:
            text = _with_split(text, split)
        settings_path = directory / "tokenizer_config.json"
        settings = read_json_object(settings_path) if settings_path.is_file() else {}
        source = _template_source(directory, settings)
        template = None if source is None else ChatTemplate(source, _special_variables(settings))
        return cls(text, template=template, eos_ids=read_eos_ids(directory), markup=markup)

    @property
    def other_ways(self) -> tuple[bool, ...]:
        """Values of `skip_special` that differ from None."""
        return tuple(skip for skip in (True, False) if self._skipped[skip] != self._skipped[None])

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1; the model's logits may have more columns."""
        return len(self._spelled)

    def encode(self, text: str, *, allow_special: bool = True, starts: bool = True) -> list[int]:
        """With `allow_special` off, special tokens spelled out in the text stay plain characters; with
        `starts` off, the text goes on from another one."""
        parsing, literal = (self._parsing, self._literal) if starts else self._inner
        tokenizer = parsing if allow_special else literal
        if len(text) > _LONG_TEXT:  # the batch call lets other threads run meanwhile, at a cost per call
            return tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return tokenizer.encode(text, add_special_tokens=False).ids

    def whole(self, text: str) -> list[int]:
        """A text by itself, with the tokens that the checkpoint puts around one."""
        return self._parsing.encode_batch([text], add_special_tokens=True)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._parsing.decode(list(token_ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int:
        """Raises ConfigError for a token the vocabulary lacks."""
        token_id = self._parsing.token_to_id(token)
        if token_id is None:
            raise ConfigError(f"the tokenizer has no token {token}")
        return token_id

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for ids beyond it."""
        return self._parsing.id_to_token(token_id) if token_id >= 0 else None

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def special_tokens(self) -> Sequence[str]:
        return tuple(token.content for token in self._added.values() if token.special)

    def token_bytes(self, token_id: int, *, skip_special: bool | None = None) -> bytes:
        """What a token adds to the text; b"" for ids beyond the vocabulary and special tokens that are
        skipped: all with True, none with False, all but `markup` with None."""
        is_told = 0 <= token_id < len(self._spelled) and token_id not in self._skipped[skip_special]
        return self._spelled[token_id] if is_told else b""

    def vocabulary(self, *, skip_special: bool | None = None) -> tuple[bytes, ...]:
        """`token_bytes` of every id, for constrained decoding."""
        skipped = self._skipped[skip_special]
        return tuple(b"" if i in skipped else spelled for i, spelled in enumerate(self._spelled))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        placeholder: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The chat as text, special tokens spelled out; see ChatTemplate.render. Raises ConfigError for
        a checkpoint without a chat template."""
        if self._template is None:
            raise ConfigError("the checkpoint has no chat template")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            placeholder=placeholder,
            tools=tools,
            variables=variables,
        )

    def decoder(self, skip_special: bool | None = None) -> IncrementalDecoder:
        return IncrementalDecoder(self, skip_special)

    def _spelling(self, token_id: int) -> bytes:
        token = self._parsing.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            mapped = [_BYTE_OF.get(c) for c in token]
            return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()


class IncrementalDecoder:
    """Token ids in, text out, never half a character. Concatenated, the texts equal `Tokenizer.decode`.

    Bytes that can't become valid UTF-8 turn into U+FFFD, as in `bytes.decode(errors="replace")`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = tokenizer.strips_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain by now."""
        data = b"".join(self._tokenizer.token_bytes(i, skip_special=self._skip_special) for i in token_ids)
        if self._strip_next and data:
            self._strip_next = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What an unfinished character comes to at the end."""
        return self._utf8.decode(b"", final=True)


def read_eos_ids(directory: Path) -> frozenset[int]:
    """From generation_config.json, else from config.json (or its text_config)."""
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).is_file():
            continue
        values = read_json_object(directory / name)
        nested = values.get("text_config")
        found = values.get("eos_token_id")
        if found is None and isinstance(nested, dict):
            found = nested.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) for i in ids):
                raise ConfigError(f"eos_token_id in {name} is not a token id")
            return frozenset(ids)
    return frozenset()


def _from_json(text: str) -> FastTokenizer:
    try:
        tokenizer = FastTokenizer.from_str(text)
    except Exception:  # tokenizers raises bare Exception
        raise ConfigError("the checkpoint's tokenizer.json is not understood") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pair(text: str) -> tuple[FastTokenizer, FastTokenizer]:
    """(parsing, literal): a mode of the whole object, hence two. To the second, "<image>" in a text is nine
    characters."""
    parsing, literal = _from_json(text), _from_json(text)
    literal.encode_special_tokens = True
    return parsing, literal


def _without_first_prefix(text: str) -> str | None:
    """The tokenizer for texts that go on from others: one whose Metaspace writes a space before the first
    piece alone ("prepend_scheme": "first") writes none. None where there is no such step."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    step = content.get("pre_tokenizer") or {}
    changed = False
    for part in step.get("pretokenizers") or [step]:
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            changed = True
    return json.dumps(content) if changed else None


def _byte_kind(tokenizer: FastTokenizer) -> str:
    """How tokens spell bytes: GPT-2's byte level alphabet, or SentencePiece's <0xNN> fallback."""
    described = repr(tokenizer.decoder)
    if "ByteLevel" in described:
        return "byte_level"
    if "ByteFallback" in described or "Metaspace" in described:
        return "sentencepiece"
    raise ConfigError("the tokenizer's decoder is neither byte level nor SentencePiece")


def _with_split(tokenizer_json: str, pattern: str) -> str:
    """Words are cut by `pattern` first: in the place of the first step of several, else before the only one.

    Reference: `fix_mistral_regex` of transformers.
    """
    value = json.loads(tokenizer_json)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    step = value.get("pre_tokenizer") or {}
    steps = step["pretokenizers"][1:] if step.get("type") == "Sequence" else [step] if step else []
    if step.get("type") == "Metaspace":  # loses spaces behind a split
        steps = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *steps]}
    return json.dumps(value)


def _strips_first_space(tokenizer: FastTokenizer) -> bool:
    described = repr(tokenizer.decoder)
    return "ByteLevel" not in described and ("Strip(" in described or "Metaspace(" in described)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json, as transformers looks."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found: Any = settings.get("chat_template")
    if (directory / "chat_template.json").is_file():
        found = read_json_object(directory / "chat_template.json").get("chat_template", found)
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError("the chat template is not a text")
    return found


def _special_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates may name."""
    variables = {}
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **settings}
    for key, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and (key in _SPECIAL_NAMES or key.endswith("_token")):
            variables[key] = content
    return variables
