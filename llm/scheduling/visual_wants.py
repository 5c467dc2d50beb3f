"""Which visual tokens live requests need, which are there, and which were asked for."""

from __future__ import annotations

from typing import Any

from llm.backend.base import VisualSlice
from llm.request import VisualKey, WantVisual
from llm.scheduling.sequence import Group
from llm.visuals import VisualSource


class VisualFailure(Exception):
    """This group's visual tokens will never come, or have the wrong number of rows."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class VisualWants:
    """Holds keys for groups from the moment they are needed until their last span is computed."""

    def __init__(self, source: VisualSource) -> None:
        self._source = source
        self._awaited: dict[VisualKey, list[Group]] = {}
        self.events: list[WantVisual] = []

    @property
    def num_awaited(self) -> int:
        return len(self._awaited)

    def any_arrived(self) -> bool:
        """Whether a key that was missing is there now, or has failed."""
        return any(self.is_settled(key) for key in self._awaited)

    def settle(self, now: float) -> list[tuple[Group, str, str]]:
        """Notes what has arrived; returns (group, code, message) of those whose key has failed."""
        failures: dict[str, tuple[Group, str, str]] = {}
        for key in [key for key in self._awaited if self.is_settled(key)]:
            rows = self._source.get(key)
            failure = self._source.failed(key) if rows is None else None
            for group in self._awaited.pop(key):
                group.asked.discard(key)
                if not group.asked:
                    _stop_encode_clock(group, now)
                told = failure if rows is None else self._check(group, key, rows)
                if told is not None:
                    failures[group.id] = (group, *told)
        return list(failures.values())

    def is_settled(self, key: VisualKey) -> bool:
        return self._source.get(key) is not None or self._source.failed(key) is not None

    def first_missing(self, group: Group, start: int) -> VisualKey | None:
        """First key needed from position `start` on that is not there; asks and holds nothing."""
        for span in group.spans:
            if span.start + span.length > start and not self._fits(group, span.key):
                return span.key
        return None

    def ensure(self, group: Group, start: int, now: float) -> int | None:
        """Holds every key needed from position `start` on and asks for those not there.

        Returns the position where the first missing span starts, None if all are there.
        Raises VisualFailure.
        """
        first_missing: int | None = None
        for span in group.spans:
            if span.start + span.length <= start:
                continue
            if span.key not in group.held:
                group.held.add(span.key)
                self._source.hold(span.key)
            if not self._present(group, span.key, now) and first_missing is None:
                first_missing = span.start
                group.missing_visual = span.key
        if first_missing is None:
            group.missing_visual = None
        return first_missing

    def slices(self, group: Group, start: int, end: int, now: float) -> tuple[int, tuple[VisualSlice, ...]]:
        """The chunk [start, end) cut just before the first span that is not there, and its visual rows.
        Raises VisualFailure."""
        slices: list[VisualSlice] = []
        for span in group.spans:
            if span.start >= end:
                break
            first, last = max(span.start, start), min(span.start + span.length, end)
            if first >= last:
                continue
            if span.key not in group.held or not self._fits(group, span.key):
                self.ensure(group, start, now)
            rows = self._source.get(span.key)
            if rows is None:
                return first, tuple(slices)
            offset = span.offset + first - span.start
            slices.append(VisualSlice(first - start, rows[offset : offset + last - first]))
        return end, tuple(slices)

    def release_before(self, group: Group, position: int, now: float) -> None:
        """Drops holds on keys whose spans all end at or before `position`."""
        needed = {span.key for span in group.spans if span.start + span.length > position}
        for key in [key for key in group.held if key not in needed]:
            self._drop(group, key, now)

    def release_all(self, group: Group, now: float) -> None:
        for key in list(group.held):
            self._drop(group, key, now)
        group.missing_visual = None

    def _fits(self, group: Group, key: VisualKey) -> bool:
        """Its visual tokens are there, as many as planned."""
        rows = self._source.get(key)
        return rows is not None and len(rows) == group.rows_of[key]

    def _present(self, group: Group, key: VisualKey, now: float) -> bool:
        if self._fits(group, key):
            return True
        rows = self._source.get(key)
        failure = self._source.failed(key) if rows is None else self._check(group, key, rows)
        if failure is not None:
            raise VisualFailure(*failure)
        if key not in group.asked:
            group.asked.add(key)
            self._awaited.setdefault(key, []).append(group)
            self.events.append(WantVisual(group.id, key))
            if group.encode_since is None:
                group.encode_since = now
        return False

    def _check(self, group: Group, key: VisualKey, rows: Any) -> tuple[str, str] | None:
        """Drops rows of another number than planned: a miss, and the second time a failure of this group."""
        if len(rows) == group.rows_of[key]:
            return None
        self._source.drop(key)
        if key not in group.misfits:
            group.misfits.add(key)
            return None
        message = f"An image has {group.rows_of[key]} placeholders but {len(rows)} visual tokens."
        return "visual_tokens_mismatch", message

    def _drop(self, group: Group, key: VisualKey, now: float) -> None:
        group.held.discard(key)
        if key in group.asked:
            group.asked.discard(key)
            self._awaited[key].remove(group)
            if not self._awaited[key]:
                del self._awaited[key]
            if not group.asked:
                _stop_encode_clock(group, now)
        self._source.release(key)


def _stop_encode_clock(group: Group, now: float) -> None:
    if group.encode_since is not None:
        group.encode_s += now - group.encode_since
        group.encode_since = None
