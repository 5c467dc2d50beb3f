"""Constrained decoding: which tokens a grammar allows next, and grammars compiled off the step."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

from llm.constraints.grammar import (
    Compiled,
    Compiler,
    GrammarDeadline,
    GrammarError,
    GrammarLimits,
    check_text,
)

log = logging.getLogger(__name__)


class GrammarCheck(Protocol):
    """Tries a constraint where it can do no harm, before it is compiled here."""

    def check(self, kind: str, text: str) -> None:
        """Raises GrammarError if it does not compile within the deadline."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of the logits stand for."""

    count: int
    eos_ids: tuple[int, ...]
    begin_with_space: np.ndarray  # bool [count]


class Matcher:
    """Where one sequence stands in its grammar.

    Models begin answers with a space that no constraint speaks of. With `spaced`, one may come before the
    first character: the space alone, or at the front of a longer token. A first token without it is one that
    the grammar itself begins with, so that a text is read in one way only.
    """

    __slots__ = ("_columns", "_matcher", "_on_error", "_spaced")

    def __init__(
        self, matcher: LLMatcher, spaced: LLMatcher | None, columns: Columns, on_error: Callable[[], None]
    ) -> None:
        """`spaced`: the same grammar before a space."""
        self._matcher = matcher
        self._spaced = spaced
        self._columns = columns
        self._on_error = on_error

    def fork(self) -> Matcher:
        spaced = None if self._spaced is None else self._spaced.deep_copy()
        return Matcher(self._matcher.deep_copy(), spaced, self._columns, self._on_error)

    def mask(self, *, ignore_eos: bool = False) -> np.ndarray:
        """bool [columns]: what may come next. End tokens are allowed only where the grammar may stop, and
        with `ignore_eos` only where nothing else may come. Raises GrammarError."""
        columns = self._columns
        allowed = self._allowed(self._matcher)
        if self._spaced is not None:
            allowed &= ~columns.begin_with_space
            allowed |= self._allowed(self._spaced)
        if ignore_eos:
            ends = allowed[list(columns.eos_ids)].copy()
            allowed[list(columns.eos_ids)] = False
            if not allowed.any():
                allowed[list(columns.eos_ids)] = ends
        if not allowed.any():
            raise GrammarError("The constraint allows no token that the model has.")
        return allowed

    def accept(self, token_id: int) -> None:
        """Moves on by a token that the last mask allowed. Raises GrammarError."""
        if self._spaced is not None and self._columns.begin_with_space[token_id]:
            self._matcher = self._spaced
        self._spaced = None
        if not self._matcher.consume_token(token_id):
            raise self._too_complex()

    @property
    def is_complete(self) -> bool:
        """The grammar is satisfied and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _allowed(self, matcher: LLMatcher) -> np.ndarray:
        packed = matcher.compute_bitmask()
        if matcher.is_error():
            raise self._too_complex()
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[: self._columns.count]
        allowed = np.zeros(self._columns.count, bool)
        allowed[: len(bits)] = bits
        return allowed

    def _too_complex(self) -> GrammarError:
        self._on_error()
        return GrammarError("The constraint became too complex while generating.")


@dataclass(slots=True)
class GrammarCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Kept:
    compiled: Future[Compiled]
    num_uses: int = 0
    successor: Future[Compiled] | None = None


class Grammars:
    """Compiled grammars, most recently used ones kept; refusals are kept too.

    A new text is tried by a `GrammarCheck` under the deadline, then compiled here, both on a thread of its
    own, where llguidance lets go of the interpreter's lock. `compile` and `start` are for the engine's.

    Whatever a request makes llguidance explore stays with its grammar, and counts for the next ones: after
    `max_uses` requests, or one that met a limit, the grammar is compiled anew.
    """

    def __init__(
        self,
        vocabulary: tuple[bytes, ...],
        eos_ids: frozenset[int],
        vocab_size: int,
        limits: GrammarLimits | None = None,
        others: Mapping[bool | None, tuple[bytes, ...]] | None = None,
        *,
        check: Callable[[tuple[bytes, ...], frozenset[int], GrammarLimits], GrammarCheck],
    ) -> None:
        """`vocab_size`: columns of the logits. `others`: the vocabulary for requests that say whether special
        tokens are skipped, where it differs. `check`: makes what tries a text first.

        Raises ValueError without an end token."""
        if not eos_ids:
            raise ValueError("constrained decoding needs an end token")
        self._limits = limits or GrammarLimits()
        spaces = np.zeros(vocab_size, bool)
        self._vocabularies: dict[bool | None, tuple[bytes, ...]] = {None: vocabulary, **(others or {})}
        for tokens in self._vocabularies.values():
            spaces[[i for i, token in enumerate(tokens[:vocab_size]) if token.startswith(b" ")]] = True
        self._columns = Columns(vocab_size, tuple(sorted(eos_ids)), spaces)
        self._check = check(vocabulary, eos_ids, self._limits)
        self._kept: OrderedDict[tuple[str, bytes, bool | None], _Kept] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compilers: dict[bool | None, Compiler] = {}
        self.counters = GrammarCounters()

    def compile(self, kind: str, text: str, skip_special: bool | None = None) -> Future[Compiled]:
        """At once if it is known. The future raises GrammarError. Raises GrammarError for what is refused
        unread."""
        check_text(kind, text, self._limits)
        mode = skip_special if skip_special in self._vocabularies else None
        key = kind, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), mode
        kept = self._kept.get(key)
        if kept is None or _is_accident(kept.compiled):
            self.counters.misses += 1
            kept = self._kept[key] = _Kept(self._pool.submit(self._compile, kind, text, mode))
        else:
            self.counters.hits += 1
            kept = self._kept[key] = self._renewed(kept, kind, text, mode)
        kept.num_uses += 1
        self._kept.move_to_end(key)
        if len(self._kept) > self._limits.max_cached:
            self._kept.popitem(last=False)
            self.counters.evictions += 1
        return kept.compiled

    def start(self, compiled: Future[Compiled], *, may_begin_with_space: bool = False) -> Matcher:
        """A matcher at the start of a grammar that is done. Raises GrammarError."""
        try:
            grammar = compiled.result()
        except GrammarError:
            raise
        except Exception:
            log.exception("a constraint could not be compiled")
            raise GrammarError("The constraint could not be compiled.") from None
        spaced = grammar.spaced.deep_copy() if may_begin_with_space and grammar.spaced else None
        return Matcher(grammar.matcher.deep_copy(), spaced, self._columns, partial(self._forget, compiled))

    def close(self) -> None:
        """Waits for the compile under way, at most its deadline."""
        self._pool.shutdown(cancel_futures=True)
        self._check.close()

    def _compile(self, kind: str, text: str, mode: bool | None) -> Compiled:
        self._check.check(kind, text)
        if mode not in self._compilers:
            self._compilers[mode] = Compiler(self._vocabularies[mode], self._columns.eos_ids)
        return self._compilers[mode].compile(kind, text)

    def _renewed(self, kept: _Kept, kind: str, text: str, mode: bool | None) -> _Kept:
        """Its successor once that is compiled; nothing waits for it."""
        if kept.num_uses < self._limits.max_uses or not _succeeded(kept.compiled):
            return kept
        if kept.successor is None:
            kept.successor = self._pool.submit(self._compilers[mode].compile, kind, text)
        return _Kept(kept.successor) if _succeeded(kept.successor) else kept

    def _forget(self, compiled: Future[Compiled]) -> None:
        for key in [key for key, kept in self._kept.items() if kept.compiled is compiled]:
            del self._kept[key]


def _succeeded(compiled: Future[Compiled]) -> bool:
    return compiled.done() and not compiled.cancelled() and compiled.exception() is None


def _is_accident(compiled: Future[Compiled]) -> bool:
    """It failed for a reason that may not come again; a deadline passes on a busy machine."""
    if not compiled.done() or compiled.cancelled():
        return compiled.cancelled()
    error = compiled.exception()
    return error is not None and (not isinstance(error, GrammarError) or isinstance(error, GrammarDeadline))
