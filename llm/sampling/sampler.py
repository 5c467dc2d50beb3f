"""From a row of logits to a token. Every result depends on the row, the request and its seed alone."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

from llm.request import RequestError, SamplingParams, TokenLogprob

_LARGEST = 1e30  # penalty and penalised logit: differences of two are finite, in float32 too
_PARTIAL_SORT = 1024  # candidates sorted before falling back to sorting the whole vocabulary


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state, so no other request can shift it."""
    packed = struct.pack("<QIIq", seed & 0xFFFFFFFFFFFFFFFF, choice, 0, position)
    return (int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def log_softmax(row: np.ndarray) -> np.ndarray:
    """float64 [vocab] log-probabilities of a row of logits."""
    shifted = row.astype(np.float64) - float(row.max())
    return shifted - np.log(np.exp(shifted).sum())


def token_logprob(row: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of `token_id` and of the `num_top` likeliest under the model's own distribution
    (before penalties, bias and temperature); ties go to the smaller id."""
    logprobs = log_softmax(row)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = likeliest(logprobs, min(num_top, len(logprobs)))
        top = tuple((int(index), float(logprobs[index])) for index in ids)
    return TokenLogprob(int(token_id), float(logprobs[token_id]), top)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for values that no sampler can honour."""
    rules = (
        ("max_tokens", params.max_tokens >= 1, "must be at least 1"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, "must be between 0 and max_tokens"),
        ("stop_token_ids", all(0 <= t < vocab_size for t in params.stop_token_ids), "has an id out of range"),
        ("temperature", 0.0 <= params.temperature < float("inf"), "must be 0 or more"),
        ("top_k", params.top_k >= 0, "must be 0 (off) or more"),
        ("top_p", 0.0 < params.top_p <= 1.0, "must be above 0 and at most 1"),
        ("min_p", 0.0 <= params.min_p <= 1.0, "must be between 0 and 1"),
        ("repetition_penalty", 0.0 < params.repetition_penalty < float("inf"), "must be above 0"),
        ("presence_penalty", abs(params.presence_penalty) <= 2.0, "must be between -2 and 2"),
        ("frequency_penalty", abs(params.frequency_penalty) <= 2.0, "must be between -2 and 2"),
        ("n", params.n >= 1, "must be at least 1"),
        ("beam_width", params.beam_width >= 1, "must be at least 1"),
        ("logprobs", params.logprobs is None or params.logprobs >= 0, "must be 0 or more"),
        (
            "prompt_logprobs",
            params.prompt_logprobs is None or params.prompt_logprobs >= 0,
            "must be 0 or more",
        ),
        ("stop", all(params.stop), "must not contain an empty string"),
        ("logit_bias", all(0 <= t < vocab_size for t, _ in params.logit_bias), "has a token id out of range"),
        ("logit_bias", all(abs(b) <= 100.0 for _, b in params.logit_bias), "must be between -100 and 100"),
    )
    for name, holds, text in rules:
        if not holds:
            raise RequestError("invalid_sampling_params", f"'{name}' {text}.", name)
    if params.beam_width > 1 and params.n > params.beam_width:
        raise RequestError("invalid_sampling_params", "'n' must not exceed 'beam_width'.", "n")
    for name in ("min_tokens", "stop_token_ids"):
        if params.beam_width > 1 and getattr(params, name):
            raise RequestError(
                "invalid_sampling_params", f"'{name}' can't be combined with beam search.", name
            )


class SamplerState:
    """How one sequence turns logits into its next token.

    Order: repetition penalty (prompt and output), frequency and presence penalties (output), logit bias,
    mask; then, unless greedy, temperature, top-k, top-p and min-p, each over what the former left.
    """

    __slots__ = ("_bias", "_counts", "_seen", "choice", "is_plain_greedy", "params", "seed", "vocab_size")

    def __init__(
        self, params: SamplingParams, prompt_ids: tuple[int, ...], vocab_size: int, seed: int, choice: int = 0
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.seed = seed
        self.choice = choice
        penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = np.zeros(vocab_size, np.float32) if penalised else None  # output tokens
        self._seen: np.ndarray | None = None  # bool [vocab]: in the prompt or the output
        if params.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, bool)
            self._seen[np.asarray(prompt_ids, np.int64)] = True
        self._bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            merged = dict(params.logit_bias)
            self._bias = np.array(list(merged), np.int64), np.array(list(merged.values()), np.float32)
        unchanged = self._counts is None and self._seen is None and self._bias is None
        self.is_plain_greedy = unchanged and params.temperature == 0.0 and params.beam_width == 1

    def fork(self, choice: int) -> SamplerState:
        other = object.__new__(SamplerState)
        other.params, other.vocab_size, other.seed, other.choice = (
            self.params,
            self.vocab_size,
            self.seed,
            choice,
        )
        other._counts = None if self._counts is None else self._counts.copy()
        other._seen = None if self._seen is None else self._seen.copy()
        other._bias, other.is_plain_greedy = self._bias, self.is_plain_greedy
        return other

    def observe(self, token_id: int) -> None:
        """A generated token joined the sequence."""
        if self._counts is not None:
            self._counts[token_id] += 1.0
        if self._seen is not None:
            self._seen[token_id] = True

    def process(self, row: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Penalties, bias and mask (bool [vocab], True is allowed) on float32 [vocab]; may copy."""
        if self._counts is None and self._seen is None and self._bias is None and mask is None:
            return row
        row, params = row.copy(), self.params
        if self._seen is not None:
            seen = row[self._seen]
            penalty = np.float32(min(max(params.repetition_penalty, 1 / _LARGEST), _LARGEST))
            with np.errstate(over="ignore"):
                row[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty).clip(-_LARGEST, _LARGEST)
        if self._counts is not None:
            row -= self._counts * np.float32(params.frequency_penalty)
            row -= (self._counts > 0) * np.float32(params.presence_penalty)
        if self._bias is not None:
            row[self._bias[0]] += self._bias[1]
        if mask is not None:
            row[~mask] = -np.inf
        return row

    def distribution(self, row: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids, float64 probabilities summing to 1) of all tokens that may be drawn, by ascending id."""
        logits = self.process(row, mask)
        params = self.params
        if params.temperature == 0.0:
            return np.array([int(logits.argmax())]), np.ones(1)
        ids = _allowed_ids(logits, params.top_k)
        return self._among(ids, logits if len(ids) == len(logits) else logits[ids])

    def _among(self, ids: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`distribution` over these ids, ascending, of these logits."""
        params = self.params
        if params.top_p < 1.0 or params.min_p > 0.0:
            # places in descending order of logit, ties by ascending id
            probs, places = _by_probability(logits, params)
            count = len(places)
            if params.top_p < 1.0:
                count = min(int(np.searchsorted(np.cumsum(probs), params.top_p)) + 1, count)
            if params.min_p > 0.0:
                count = min(count, int(np.count_nonzero(probs >= params.min_p * probs[0])))
            kept = np.sort(places[: max(count, 1)])
            ids, logits = ids[kept], logits[kept]
        return ids, _probabilities(logits, params.temperature)

    def sample(self, row: np.ndarray, position: int, mask: np.ndarray | None = None) -> int:
        """The token for output index `position`."""
        if self.params.temperature == 0.0:
            return int(self.process(row, mask).argmax())
        ids, probs = self.distribution(row, mask)
        return draw(ids, probs, uniform(self.seed, self.choice, position))

    @property
    def num_candidates(self) -> int:
        """Largest logits of a row that `sample_among` needs; 0 where `sample` needs them all."""
        params = self.params
        unchanged = self._counts is None and self._seen is None and self._bias is None
        return params.top_k if unchanged and params.temperature > 0.0 else 0

    def sample_among(self, ids: np.ndarray, logits: np.ndarray, position: int) -> int:
        """As `sample`, from the `num_candidates` largest of a row and what equals the last of them, by
        ascending id."""
        ids, probs = self._among(ids, logits)
        return draw(ids, probs, uniform(self.seed, self.choice, position))


def draw(ids: np.ndarray, probs: np.ndarray, at: float) -> int:
    """The token whose part of the cumulated probabilities holds `at` in [0, 1)."""
    cumulated = np.cumsum(probs)
    index = int(np.searchsorted(cumulated, at * cumulated[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _allowed_ids(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Ascending ids left by the mask and top-k; ties with the k-th logit stay."""
    if 0 < top_k < len(logits):
        kth = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        return np.flatnonzero((logits >= kth) & (logits > -np.inf))
    return np.flatnonzero(logits > -np.inf)


def _probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64 softmax; exponents in float32, several times faster on a large vocabulary."""
    weights = np.exp((logits - logits.max()) * np.float32(1.0 / max(temperature, 1e-6)))
    return weights / weights.sum(dtype=np.float64)


def _by_probability(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (over all logits) and places, likeliest first, no fewer than top-p and min-p keep."""
    probs = _probabilities(logits, params.temperature)
    if len(probs) > 4 * _PARTIAL_SORT:
        floor = np.partition(probs, len(probs) - _PARTIAL_SORT)[len(probs) - _PARTIAL_SORT]
        front = np.nonzero(probs >= floor)[0]
        enough = (
            probs[front].sum() > params.top_p if params.top_p < 1.0 else floor < params.min_p * probs.max()
        )
        if enough:
            order = front[np.argsort(-probs[front], kind="stable")]
            return probs[order], order
    order = np.argsort(-probs, kind="stable")
    return probs[order], order


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest, largest first, ties by ascending index."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")[:count]
    kth = np.partition(values, len(values) - count)[len(values) - count]
    front = np.nonzero(values >= kth)[0]
    return front[np.argsort(-values[front], kind="stable")][:count]
