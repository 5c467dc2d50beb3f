"""Counters of a run, updated by the runner and read by the progress line."""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from vlm.caption.rows import Row

NUM_SLOWEST = 5
_WINDOW_S, _NUM_RECENT = 30.0, 4096


@dataclass(slots=True)
class RunStats:
    pages_done: int = 0  # rows written by this run, errors included
    pages_kept: int = 0  # rows that an earlier run wrote
    errors: int = 0
    errors_kept: int = 0
    duplicates: int = 0
    prompt_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sources_found: int = 0  # by the counting pass, which runs ahead
    all_found: bool = False  # the counting pass has ended
    sources_known: int = 0  # files whose pages are counted
    pages_known: int = 0  # in these files
    error_codes: Counter[str] = field(default_factory=Counter)
    warning_codes: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str, int]] = field(default_factory=list)  # heap of (total_ms, path, page)
    started: float = field(default_factory=time.monotonic)
    _recent: deque[tuple[float, int]] = field(init=False, default_factory=lambda: deque(maxlen=_NUM_RECENT))

    def add(self, row: Row) -> None:
        self.pages_done += 1
        if "warning" in row:
            self.warning_codes[row["warning"]["code"]] += 1
        tokens = 0
        if "error" in row:
            self.errors += 1
            self.error_codes[row["error"]["code"]] += 1
        elif "duplicate_of" in row:
            self.duplicates += 1
        else:
            usage = row["usage"]
            tokens = usage["completion_tokens"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.image_tokens += usage["image_tokens"]
            self.cached_tokens += usage["cached_tokens"]
            self.completion_tokens += tokens
            heapq.heappush(self.slowest, (row["timings"]["total_ms"], row["path"], row["page"]))
            if len(self.slowest) > NUM_SLOWEST:
                heapq.heappop(self.slowest)
        self._recent.append((time.monotonic(), tokens))

    def keep(self, state: str) -> None:
        self.pages_kept += 1
        self.errors_kept += state == "error"

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def num_pages(self) -> int:
        return self.pages_done + self.pages_kept

    def rates(self) -> tuple[float, float]:
        """(pages, tokens) per second over the last moments."""
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in self._recent if now - at <= _WINDOW_S]
        span_s = min(_WINDOW_S, now - self.started)
        if len(recent) == _NUM_RECENT:
            span_s = now - recent[0][0]
        return len(recent) / max(span_s, 1e-3), sum(tokens for _, tokens in recent) / max(span_s, 1e-3)

    def know(self, num_pages: int) -> None:
        """The feed has come to the next file, which has so many pages."""
        self.sources_known += 1
        self.pages_known += num_pages

    def total_pages(self) -> tuple[int, bool] | None:
        """(pages of all inputs, whether that is more than a guess from the pages per file so far)."""
        if not (self.all_found and self.pages_known):
            return None
        left = max(0, self.sources_found - self.sources_known)
        total = self.pages_known + round(left * self.pages_known / self.sources_known)
        return max(total, self.num_pages), not left or self.pages_known == self.sources_known

    def remaining_s(self) -> float | None:
        """None while nothing says how much is left, or how fast it goes."""
        pages_per_s, _ = self.rates()
        total = self.total_pages()
        return (total[0] - self.num_pages) / pages_per_s if total and pages_per_s else None
