"""Stop strings over a text stream: hold back only what could still become one."""

from __future__ import annotations


class StopChecker:
    """Cuts a stream of text at the first of `stops`, wherever token borders fall.

    Works on whole characters: the detokenizer has already joined UTF-8 sequences.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed)."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        # The first stop to be complete wins, as if characters came one by one: (end, start).
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = self._num_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
