"""Constrained decoding: which tokens a grammar allows next, and grammars compiled off the step."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from llm.constraints.grammar import GrammarError, GrammarLimits, check_text, compile_matcher, make_tokenizer
from llm.constraints.grammar_sandbox import Sandbox

log = logging.getLogger(__name__)


class Matcher:
    """Where one sequence stands in its grammar."""

    __slots__ = ("_eos_ids", "_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def fork(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def mask(self, *, ignore_eos: bool = False) -> np.ndarray:
        """bool [vocab]: what may come next. End tokens are allowed only where the grammar may stop, and
        with `ignore_eos` only where nothing else may come. Raises GrammarError."""
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError("The constraint became too complex while generating.")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: self._vocab_size]
        allowed = np.zeros(self._vocab_size, bool)
        allowed[: len(bits)] = bits
        if ignore_eos:
            ends = allowed[list(self._eos_ids)].copy()
            allowed[list(self._eos_ids)] = False
            if not allowed.any():
                allowed[list(self._eos_ids)] = ends
        if not allowed.any():
            raise GrammarError("The constraint allows no token that the model has.")
        return allowed

    def accept(self, token_id: int) -> None:
        """Moves on by a token that the last mask allowed. Raises GrammarError."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError("The constraint became too complex while generating.")

    @property
    def is_complete(self) -> bool:
        """The grammar is satisfied and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


@dataclass(slots=True)
class GrammarCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class Grammars:
    """Compiled grammars, most recently used ones kept; refusals are kept too.

    A new text is compiled in a sandbox process under the deadline, then here, both on a thread of its own,
    where llguidance lets go of the interpreter's lock. `compile` and `start` are for the engine's thread.
    """

    def __init__(
        self,
        vocabulary: tuple[bytes, ...],
        eos_ids: frozenset[int],
        vocab_size: int,
        limits: GrammarLimits | None = None,
    ) -> None:
        """`vocab_size`: columns of the logits. Raises ValueError without an end token."""
        if not eos_ids:
            raise ValueError("constrained decoding needs an end token")
        self._limits = limits or GrammarLimits()
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(eos_ids))
        self._vocabulary = vocabulary
        self._sandbox = Sandbox(vocabulary, eos_ids, self._limits)
        self._compiled: OrderedDict[tuple[str, bytes], Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self.counters = GrammarCounters()

    def compile(self, kind: str, text: str) -> Future[LLMatcher]:
        """At once if it is known. The future raises GrammarError. Raises GrammarError for what is refused
        unread."""
        check_text(kind, text, self._limits)
        key = kind, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        found = self._compiled.get(key)
        if found is not None and not _is_accident(found):
            self.counters.hits += 1
            self._compiled.move_to_end(key)
            return found
        self.counters.misses += 1
        self._compiled[key] = self._pool.submit(self._compile, kind, text)
        self._compiled.move_to_end(key)
        if len(self._compiled) > self._limits.max_cached:
            self._compiled.popitem(last=False)
            self.counters.evictions += 1
        return self._compiled[key]

    def start(self, compiled: Future[LLMatcher]) -> Matcher:
        """A matcher at the start of a grammar that is done. Raises GrammarError."""
        try:
            return Matcher(compiled.result().deep_copy(), self._vocab_size, self._eos_ids)
        except GrammarError:
            raise
        except Exception:
            log.exception("a constraint could not be compiled")
            raise GrammarError("The constraint could not be compiled.") from None

    def close(self) -> None:
        """Waits for the compile under way, at most its deadline."""
        self._pool.shutdown(cancel_futures=True)
        self._sandbox.close()

    def _compile(self, kind: str, text: str) -> LLMatcher:
        self._sandbox.check(kind, text)
        if self._tokenizer is None:
            self._tokenizer = make_tokenizer(self._vocabulary, self._eos_ids)
        return compile_matcher(self._tokenizer, kind, text)


def _is_accident(compiled: Future[LLMatcher]) -> bool:
    """It failed for a reason that may not come again."""
    if not compiled.done() or compiled.cancelled():
        return compiled.cancelled()
    error = compiled.exception()
    return error is not None and not isinstance(error, GrammarError)
