"""Batch answers in pieces: nobody watches them live."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llm.request import Delta, Event, Priority

PIECE_TOKENS = 16


class Pieces:
    """Joins the tokens of batch requests. The first is sent at once, then `PIECE_TOKENS` together.

    Every event costs the serving process time on its way to a client, and the processor that it takes for
    batch work is one that interactive requests wait for. Texts, tokens and their order stay the same.
    """

    def __init__(self, priority_of: Callable[[str], Priority | None]) -> None:
        """`priority_of` a request id; None for a request that is not known any more."""
        self._priority_of = priority_of
        self._held: dict[str, dict[int, list[Delta]]] = {}  # by request and choice, once its first was told

    def __len__(self) -> int:
        """Tokens held back."""
        return sum(len(deltas) for choices in self._held.values() for deltas in choices.values())

    def join(self, events: Iterable[Event]) -> list[Event]:
        """What may be sent now, in order."""
        told: list[Event] = []
        for event in events:
            if not isinstance(event, Delta):
                told += self._release(event.request_id)
                told.append(event)
            elif self._priority_of(event.request_id) != "batch":
                told.append(event)
            else:
                told += self._add(event)
        return told

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def _add(self, delta: Delta) -> list[Event]:
        choices = self._held.setdefault(delta.request_id, {})
        held = choices.get(delta.choice)
        if held is None:
            choices[delta.choice] = []
            return [delta]
        held.append(delta)
        if len(held) < PIECE_TOKENS:
            return []
        choices[delta.choice] = []
        return [_joined(held)]

    def _release(self, request_id: str) -> list[Event]:
        choices = self._held.get(request_id, {})
        told: list[Event] = [_joined(deltas) for deltas in choices.values() if deltas]
        for choice in choices:
            choices[choice] = []
        return told


def _joined(deltas: list[Delta]) -> Delta:
    return Delta(
        deltas[0].request_id,
        deltas[0].choice,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )
