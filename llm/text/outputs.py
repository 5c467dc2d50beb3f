"""From token ids to text that may be shown."""

from __future__ import annotations

from typing import Protocol

from llm.text.stops import StopChecker


class TokenDecoder(Protocol):
    """Incremental detokenizer of one choice; keeps an incomplete UTF-8 sequence until it is complete."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...

    def flush(self) -> str: ...


class TokenText(Protocol):
    """What the engine needs of a tokenizer."""

    def decoder(self) -> TokenDecoder: ...


class TextStream:
    """One choice's text: detokenized, and cut at the first stop string."""

    __slots__ = ("_decoder", "_stops")

    def __init__(self, tokens: TokenText, stops: tuple[str, ...]) -> None:
        self._decoder = tokens.decoder()
        self._stops = StopChecker(stops) if stops else None

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed)."""
        text = self._decoder.push((token_id,))
        return (text, False) if self._stops is None else self._stops.push(text)

    def flush(self) -> tuple[str, bool]:
        """The end: what the detokenizer kept and what could have become a stop string."""
        text = self._decoder.flush()
        if self._stops is None:
            return text, False
        shown, stopped = self._stops.push(text)
        return (shown, True) if stopped else (shown + self._stops.flush(), False)
