"""From token ids to text that may be shown."""

from __future__ import annotations

import sys
from typing import AnyStr, Protocol

from llm.request import SamplingParams
from llm.text.stops import StopChecker


class TokenDecoder(Protocol):
    """Incremental detokenizer of one choice; keeps an incomplete UTF-8 sequence until it is complete."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...

    def flush(self) -> str: ...


class TokenText(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def strips_first_space(self) -> bool:
        """Whether its decoders drop a space that begins the text, as SentencePiece's do."""
        ...

    def decoder(self, skip_special: bool | None = None) -> TokenDecoder:
        """skip_special: whether special tokens are left out of the text; None is the model's own way."""
        ...


class LeadingSpaces:
    """Takes the spaces off the front of an answer that comes in pieces: all of them, or only the one before
    what a constraint describes."""

    __slots__ = ("left",)

    def __init__(self, params: SamplingParams) -> None:
        self.left = 0 if not params.drop_leading_space else sys.maxsize if params.constraint is None else 1

    def take_off(self, piece: AnyStr) -> AnyStr:
        if not self.left or not piece:
            return piece
        rest = without_spaces(piece, self.left)
        self.left = 0 if rest else self.left - len(piece)
        return rest


def without_spaces(piece: AnyStr, count: int) -> AnyStr:
    """`piece` without its first spaces, at most `count`."""
    spaces = len(piece) - len(piece.lstrip(" " if isinstance(piece, str) else b" "))
    return piece[min(spaces, count) :]


class TextStream:
    """One choice's text: detokenized, its leading spaces dropped, and cut at the first stop string."""

    __slots__ = ("_decoder", "_spaces", "_stops")

    def __init__(self, tokens: TokenText, params: SamplingParams) -> None:
        self._decoder = tokens.decoder(params.skip_special_tokens)
        self._spaces = LeadingSpaces(params)
        if tokens.strips_first_space and self._spaces.left:
            self._spaces.left -= 1
        self._stops = StopChecker(params.stop) if params.stop else None

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed)."""
        text = self._spaces.take_off(self._decoder.push((token_id,)))
        return (text, False) if self._stops is None else self._stops.push(text)

    def flush(self) -> tuple[str, bool]:
        """The end: what the detokenizer kept and what could have become a stop string."""
        text = self._decoder.flush()
        if self._stops is None:
            return text, False
        shown, stopped = self._stops.push(text)
        return (shown, True) if stopped else (shown + self._stops.flush(), False)
