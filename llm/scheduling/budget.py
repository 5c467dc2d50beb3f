"""How many prompt tokens may ride along with a step's decodes, learnt from measured step times."""

from __future__ import annotations


class StepBudget:
    """Keeps a step that carries chunks within `stretch` times a step of decodes alone.

    step seconds = decode seconds + chunk tokens x seconds per chunk token; both are moving averages.
    While nothing decodes no stream waits, and a step takes `max_tokens`; with `min_alone`, as many as fit
    into `max_step_s` and at least so many, since who comes meanwhile waits for it. `stretch=None` fixes the
    budget.
    Bound: a step with decodes carries at most max(min_chunk, max_tokens - decodes) chunk tokens, always.
    """

    def __init__(
        self,
        max_tokens: int,
        min_chunk: int,
        stretch: float | None,
        max_step_s: float,
        min_alone: int | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._min_chunk = min_chunk
        self._stretch = stretch
        self._max_step_s = max_step_s
        self._decode_s: float | None = None  # a step of decodes alone
        self._token_s: float | None = None  # one chunk token more
        self._min_alone = min_alone
        self._alone_s: float | None = None  # a chunk token without decodes
        self._last_chunk = min_chunk  # largest chunk tokens tried beside decodes, grown step by step

    def chunk_tokens(self, num_decodes: int) -> int:
        """Chunk tokens for a step with so many decodes. 0: run these alone once, to learn their time."""
        cap = max(self._max_tokens - num_decodes, self._min_chunk)
        if self._stretch is None:
            return cap
        if num_decodes == 0:
            return self._alone(cap)
        if self._decode_s is None:
            return 0
        target_s = min(self._stretch * self._decode_s, self._max_step_s)
        if self._token_s is None:
            return min(self._min_chunk, cap)
        fitting = int((target_s - self._decode_s) / self._token_s)
        return max(self._min_chunk, min(fitting, cap, 2 * self._last_chunk))

    def _alone(self, cap: int) -> int:
        if self._min_alone is None:
            return cap
        fitting = 0 if self._alone_s is None else int(self._max_step_s / self._alone_s)
        return min(cap, max(fitting, self._min_alone))

    def observe(self, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        if self._stretch is None:
            return
        if num_chunk_tokens == 0:
            # A clock that does not advance (a fake one) still counts as having measured.
            self._decode_s = _average(self._decode_s, max(seconds, 1e-9), 0.2)
        elif num_decodes == 0:
            self._alone_s = _average(self._alone_s, max(seconds, 1e-9) / num_chunk_tokens, 0.3)
        elif self._decode_s is not None:
            token_s = max(seconds - self._decode_s, 0.05 * seconds, 1e-9) / num_chunk_tokens
            self._token_s = _average(self._token_s, token_s, 0.3)
            self._last_chunk = max(num_chunk_tokens, self._min_chunk)


def _average(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
