"""One engine and one encoder on one device, stepped together: tiles in, text out.

Implements the engine's `VisualSource` with the encoder's cache and batcher.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from encoder.cache import VisualCache

from llm.request import VisualKey

MAX_REMEMBERED_FAILURES = 1024


class CachedVisuals:
    """`llm.visuals.VisualSource` over a `VisualCache`; remembers the keys that failed for good."""

    def __init__(self, cache: VisualCache) -> None:
        self._cache = cache
        self._failures: OrderedDict[VisualKey, tuple[str, str]] = OrderedDict()

    def get(self, key: VisualKey) -> Any | None:
        return self._cache.get(key)

    def hold(self, key: VisualKey) -> None:
        self._cache.hold(key)

    def release(self, key: VisualKey) -> None:
        self._cache.release(key)

    def failed(self, key: VisualKey) -> tuple[str, str] | None:
        return self._failures.get(key)

    def fail(self, key: VisualKey, code: str, message: str) -> None:
        self._failures[key] = (code, message)
        while len(self._failures) > MAX_REMEMBERED_FAILURES:
            self._failures.popitem(last=False)

    def forget_failure(self, key: VisualKey) -> None:
        self._failures.pop(key, None)
