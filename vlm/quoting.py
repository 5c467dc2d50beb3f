"""Special tokens that a user spells out stay plain text, through whatever a chat template makes of the text.

The first character of each such spelling has a stand-in while the template is rendered, one for one, so that
only the template's own special tokens can be read as such. A spelling may also be cut off where a text ends,
to be completed by the next part or by the template: what could become one is quoted alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llm.request import RequestError

_FIRST_STAND_IN = 0xD800  # lone surrogates: no valid text holds one, so none has to be escaped
_SURROGATE = re.compile("[\ud800-\udfff]")


class Quoting:
    """`specials`: spellings of the special tokens that no user may write."""

    def __init__(self, specials: Sequence[str]) -> None:
        ordered = sorted(filter(None, set(specials)), key=lambda token: (-len(token), token))
        edges = sorted({edge for token in ordered for edge in (token[0], token[-1])})
        self._stand_ins = {edge: chr(_FIRST_STAND_IN + index) for index, edge in enumerate(edges)}
        self._originals = str.maketrans({stand_in: edge for edge, stand_in in self._stand_ins.items()})
        self._spelled = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._beginnings = frozenset(token[:end] for token in ordered for end in range(1, len(token)))
        self._endings = frozenset(token[start:] for token in ordered for start in range(1, len(token)))
        self._longest = max(map(len, ordered), default=1) - 1  # characters of a spelling that is cut off

    def quote(self, text: str) -> str:
        """As long as `text`. Raises `RequestError` for half a character, which has no tokens either."""
        if _SURROGATE.search(text):
            raise RequestError("invalid_request", "The text is not valid Unicode: it holds half a character.")
        places = self._cut_off(text)
        found = self._spelled.search(text)
        while found:
            places.add(found.start())
            found = self._spelled.search(text, found.start() + 1)
        if not places:
            return text
        characters = list(text)
        for place in places:
            characters[place] = self._stand_ins[text[place]]
        return "".join(characters)

    def _cut_off(self, text: str) -> set[int]:
        """Where a spelling begins that the text's end cuts off, and where one ends that began before the
        text. Templates may trim a text, so both are looked for beyond white space too."""
        places: set[int] = set()
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        for length in range(1, self._longest + 1):
            for stop in {end, len(text)}:
                if length <= stop and text[stop - length : stop] in self._beginnings:
                    places.add(stop - length)
            for begin in {start, 0}:
                if begin + length <= len(text) and text[begin : begin + length] in self._endings:
                    places.add(begin + length - 1)
        return places

    def unquoted(self, rendered: str) -> str | None:
        """The text as it was written; None where a special token's spelling in it is to stay text."""
        pieces = self.split(rendered)
        return None if any(is_quoted for _, is_quoted in pieces) else "".join(text for text, _ in pieces)

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """(text, whether it is a special token's spelling that is to stay text), in order, none empty."""
        text = rendered.translate(self._originals) if _SURROGATE.search(rendered) else rendered
        if text is rendered:
            return [(text, False)] if text else []
        pieces: list[tuple[str, bool]] = []
        done = 0
        for found in self._spelled.finditer(text):
            if rendered[found.start() : found.end()] != found.group():
                pieces += [(text[done : found.start()], False), (found.group(), True)]
                done = found.end()
        pieces.append((text[done:], False))
        return [piece for piece in pieces if piece[0]]
