"""Where guesses of the next tokens come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses for one sequence; tokens are only ever appended between two calls."""

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens that may come next; none if it knows none."""
        ...


class NGramDraft:
    """What followed the last time the newest tokens occurred, in prompt or output. Longest match first.

    A match that reaches the end goes on with its own guesses, so a repetition is guessed at full length.
    """

    def __init__(self, sizes: tuple[int, ...] = (4, 2)) -> None:
        self._sizes = sizes
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self._num_indexed = 0  # n-grams that end at or before it are known

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._follows[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for size in self._sizes:
            position = self._follows.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if position is not None:
                period = len(tokens) - position
                return tuple(tokens[position + i % period] for i in range(count))
        return ()
