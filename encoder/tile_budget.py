"""How many tiles fit into a step, learnt from measured batches."""

from __future__ import annotations

_WEIGHT = 0.5  # of the latest batch in the mean


class TileBudget:
    """At least one tile, and as many more as take `max_step_s` at the rate of late. None: no bound.

    One tile until a rate is known, so that the first step of a slow tower is not a long one.
    """

    def __init__(self, max_step_s: float | None) -> None:
        if max_step_s is not None and max_step_s <= 0:
            raise ValueError("max_step_s must be above 0, or None")
        self._max_step_s = max_step_s
        self._tile_s: float | None = None

    def fit(self, num_tiles: int) -> int:
        """At most so many."""
        if self._max_step_s is None:
            return num_tiles
        if self._tile_s is None:
            return min(num_tiles, 1)
        return max(1, min(num_tiles, int(self._max_step_s / self._tile_s)))

    def observe(self, num_tiles: int, seconds: float) -> None:
        latest = max(seconds, 1e-9) / num_tiles  # a clock that stands still measures too
        self._tile_s = latest if self._tile_s is None else (1 - _WEIGHT) * self._tile_s + _WEIGHT * latest
