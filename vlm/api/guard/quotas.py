"""Requests and tokens a minute: a bucket for each caller and kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from vlm.requests.errors import ApiError

Kind = Literal["requests", "tokens"]
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in get_args(Kind) for what in ("limit", "remaining", "reset")
)


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float  # seconds on the clock, when `level` held


class Quotas:
    """A bucket holds a minute's worth at most.

    Requests are taken before they run. Tokens are spent when an answer has ended, when their number is
    known: a bucket may fall below zero, and the caller waits until it is above.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], _Bucket] = {}

    def take_request(self, name: str, per_minute: int) -> None:
        """Raises ApiError 429 with the time until the next request is accepted."""
        if per_minute <= 0:
            return
        bucket = self._filled(name, "requests", per_minute)
        if bucket.level < 1:
            raise _exceeded("requests", per_minute, 1 - bucket.level)
        bucket.level -= 1

    def check_tokens(self, name: str, per_minute: int) -> None:
        """Raises ApiError 429 with the time until there are tokens again."""
        if per_minute > 0 and (level := self._filled(name, "tokens", per_minute).level) <= 0:
            raise _exceeded("tokens", per_minute, 1 - level)

    def spend_tokens(self, name: str, per_minute: int, count: int) -> None:
        if per_minute > 0:
            self._filled(name, "tokens", per_minute).level -= count

    def headers(self, name: str, limits: dict[Kind, int]) -> dict[str, str]:
        """As OpenAI names them; only for the kinds that are limited."""
        found = {}
        for kind, per_minute in limits.items():
            if per_minute > 0:
                level = self._filled(name, kind, per_minute).level
                found[f"x-ratelimit-limit-{kind}"] = str(per_minute)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(level)))
                found[f"x-ratelimit-reset-{kind}"] = f"{(per_minute - level) * 60 / per_minute:.3f}s"
        return found

    def _filled(self, name: str, kind: Kind, per_minute: int) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault((name, kind), _Bucket(float(per_minute), now))
        bucket.level = min(float(per_minute), bucket.level + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        return bucket


def _exceeded(kind: Kind, per_minute: int, missing: float) -> ApiError:
    return ApiError(
        429,
        "rate_limit_exceeded",
        f"This key is limited to {per_minute} {kind} a minute.",
        retry_after_s=missing * 60 / per_minute,
    )
