"""How many prompt tokens may ride along with a step's decodes, learnt from measured step times."""

from __future__ import annotations


class StepBudget:
    """Keeps a step that carries chunks within `stretch` times a step of decodes alone.

    step seconds = decode seconds + chunk tokens x seconds per chunk token; both are moving averages.
    While nothing decodes nobody waits, and a step takes `max_tokens`. `stretch=None` fixes the budget.
    Bound: a step with decodes carries at most max(min_chunk, max_tokens - decodes) chunk tokens, always.
    """

    def __init__(self, max_tokens: int, min_chunk: int, stretch: float | None, max_step_s: float) -> None:
        self._max_tokens = max_tokens
        self._min_chunk = min_chunk
        self._stretch = stretch
        self._max_step_s = max_step_s
        self._decode_s: float | None = None  # a step of decodes alone
        self._token_s: float | None = None  # one chunk token more
        self._last_chunk = min_chunk  # largest chunk tokens tried beside decodes, grown step by step

    def chunk_tokens(self, num_decodes: int) -> int:
        """Chunk tokens for a step with so many decodes. 0: run these alone once, to learn their time."""
        cap = max(self._max_tokens - num_decodes, self._min_chunk)
        if num_decodes == 0 or self._stretch is None:
            return cap
        if self._decode_s is None:
            return 0
        target_s = min(self._stretch * self._decode_s, self._max_step_s)
        if self._token_s is None:
            return min(self._min_chunk, cap)
        fitting = int((target_s - self._decode_s) / self._token_s)
        return max(self._min_chunk, min(fitting, cap, 2 * self._last_chunk))

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        if self._stretch is None:
            return
        if num_chunk_tokens == 0:
            # A clock that does not advance (a fake one) still counts as having measured.
            self._decode_s = _average(self._decode_s, max(seconds, 1e-9), 0.2)
        elif num_decodes and self._decode_s is not None:
            token_s = max(seconds - self._decode_s, 0.05 * seconds, 1e-9) / num_chunk_tokens
            self._token_s = _average(self._token_s, token_s, 0.3)
            self._last_chunk = max(num_chunk_tokens, self._min_chunk)


def _average(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
