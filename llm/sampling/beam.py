"""Beam search over rows of log-probabilities; the engine turns its choices into block forks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llm.request import FinishReason, TokenLogprob
from llm.sampling.sampler import likeliest


@dataclass(frozen=True, slots=True)
class Extension:
    """Beam `parent` goes on with `token_id`; `score` is its sum of log-probabilities."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: tuple[int, ...]
    score: float  # sum of log-probabilities / number of tokens, the end token included
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


class BeamSearch:
    """`width` live beams and the `width` best finished ones.

    Each round ranks the 2 x width best extensions of all beams. Those of the best `width` that end with an
    end token are finished; the best that do not end live on. Over when `width` are finished and the best
    live beam's score per token no longer exceeds the worst of them. Ties go to the earlier beam, then the
    smaller id. Reference: transformers' beam search with length_penalty 1 and early_stopping False.
    """

    def __init__(self, width: int, max_tokens: int, eos_ids: frozenset[int]) -> None:
        self.width = width
        self.finished: list[Hypothesis] = []  # best first
        self.is_done = False
        self._max_tokens = max_tokens
        self._eos_ids = eos_ids

    def rank(self, scores: list[float], logprobs: list[np.ndarray]) -> list[Extension]:
        """The 2 x width best extensions, best first. `logprobs[i]`: float64 [vocab] of beam i."""
        vocab = len(logprobs[0])
        totals = np.concatenate([row + score for row, score in zip(logprobs, scores, strict=True)])
        best = likeliest(totals, min(2 * self.width, len(totals)))
        return [
            Extension(int(i) // vocab, int(i) % vocab, float(totals[i])) for i in best if totals[i] > -np.inf
        ]

    def is_end(self, extension: Extension, rank: int) -> bool:
        """Whether it finishes a hypothesis; an end token below the best `width` is dropped instead."""
        return extension.token_id in self._eos_ids and rank < self.width

    def live(self, ranked: list[Extension]) -> list[Extension]:
        return [extension for extension in ranked if extension.token_id not in self._eos_ids][: self.width]

    def finish(self, hypothesis: Hypothesis) -> None:
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda item: -item.score)  # stable: earlier ones win ties
        del self.finished[self.width :]

    def settle(self, best_live: float | None, num_tokens: int) -> None:
        """After a round of `num_tokens` generated tokens; `best_live` is the best live beam's score."""
        if best_live is None or num_tokens >= self._max_tokens:
            self.is_done = True
        elif len(self.finished) >= self.width:
            self.is_done = best_live / num_tokens <= self.finished[-1].score
