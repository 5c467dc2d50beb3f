"""How much work fits into a step of tiles, learnt from measured batches."""

from __future__ import annotations

import math

_WEIGHT = 0.5  # of the latest batch in the mean


class TileBudget:
    """As much work as takes `max_step_s` at the rate of late. None: no bound.

    Nothing until a rate is known: with the one tile that a step takes at least, the first step of a slow
    tower is not a long one.
    """

    def __init__(self, max_step_s: float | None) -> None:
        if max_step_s is not None and max_step_s <= 0:
            raise ValueError("max_step_s must be above 0, or None")
        self._max_step_s = max_step_s
        self._seconds: float | None = None  # of a unit of work

    def left(self) -> float:
        """In the batcher's unit of work."""
        if self._max_step_s is None:
            return math.inf
        return 0.0 if self._seconds is None else self._max_step_s / self._seconds

    def observe(self, work: float, seconds: float) -> None:
        latest = max(seconds, 1e-9) / work  # a clock that stands still measures too
        self._seconds = latest if self._seconds is None else (1 - _WEIGHT) * self._seconds + _WEIGHT * latest
