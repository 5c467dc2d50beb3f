"""Answered responses, for their callers to read and to go on from. In memory, bounded in every way."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm.api.guard.auth import Caller
from vlm.requests.errors import ApiError

Json = dict[str, Any]


def _size(value: object) -> int:
    """Bytes in memory of a JSON value."""
    size = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return size + sum(_size(key) + _size(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return size + sum(map(_size, value))
    return size


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """messages: the chat up to and with the answer, without instructions; num_bytes counts all of it, though
    a chat's responses share what came before."""

    response: Json
    messages: Sequence[Json]
    num_bytes: int
    expires_at: float


class ResponseStore:
    """At its cap the oldest go. Used from one event loop."""

    def __init__(
        self, max_count: int, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[tuple[Caller, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, caller: Caller, response: Json, messages: Sequence[Json]) -> bool:
        """Whether it is kept: not if it alone is larger than the store."""
        num_bytes = _size(response) + _size(messages)
        self._expire()
        if num_bytes > self._max_bytes or not self._max_count:
            return False
        while len(self._kept) >= self._max_count or self.num_bytes + num_bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))
        entry = StoredResponse(response, messages, num_bytes, self._clock() + self._ttl_s)
        self._kept[caller, response["id"]] = entry
        self.num_bytes += num_bytes
        return True

    def get(self, caller: Caller, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 where this caller has no such response (any more)."""
        self._expire()
        entry = self._kept.get((caller, response_id))
        if entry is None:
            raise ApiError(
                404, "response_not_found", "No such response is stored (any more) for this key.", param
            )
        return entry

    def find_item(self, caller: Caller, item_id: str, param: str) -> Json:
        """Of a stored response's output. Raises ApiError 404."""
        self._expire()
        for (owner, _), entry in self._kept.items():
            if owner == caller:
                for item in entry.response["output"]:
                    if item["id"] == item_id:
                        return dict(item)
        raise ApiError(404, "item_not_found", "No such item is stored (any more) for this key.", param)

    def delete(self, caller: Caller, response_id: str) -> None:
        """Raises ApiError 404."""
        self.get(caller, response_id)
        self._remove((caller, response_id))

    def _remove(self, key: tuple[Caller, str]) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes

    def _expire(self) -> None:
        """All live equally long, so the oldest expires first."""
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).expires_at <= now:
            self._remove(next(iter(self._kept)))
