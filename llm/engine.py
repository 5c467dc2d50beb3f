"""The engine: many requests at once, one step = plan, execute, commit."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from llm.backend.base import Backend, Logits
from llm.commit import ENGINE_FAULT, Committer
from llm.engine_config import EngineConfig
from llm.engine_stats import EngineCounters, EngineStats
from llm.request import Event, Failed, Prompt, Request, RequestError, SamplingParams
from llm.sampling.beam import BeamSearch
from llm.sampling.sampler import SamplerState, check_params
from llm.scheduling.blocks import BlockPool
from llm.scheduling.picks import StepPicks
from llm.scheduling.saved_prefixes import BlockStore, ReadRule, SavedPrefixes
from llm.scheduling.scheduler import Scheduler
from llm.scheduling.sequence import Group, Sequence
from llm.scheduling.visual_wants import VisualWants
from llm.text.outputs import TextStream, TokenText
from llm.visuals import VisualSource

if TYPE_CHECKING:
    from llm.constraints.constrain import Grammars
    from llm.constraints.grammar import Compiled

log = logging.getLogger(__name__)

_NAP_S = 0.002  # at most, while nothing can run until a constraint is compiled


class Engine:
    """Serves requests step by step on one backend. Not thread-safe: one owner calls it.

    `submit` checks and queues, `step` returns what happened, `cancel` frees at once and says nothing.
    """

    def __init__(
        self,
        backend: Backend,
        visuals: VisualSource,
        config: EngineConfig,
        tokens: TokenText,
        eos_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        store: BlockStore | None = None,
        read_rule: ReadRule = lambda num_tokens, num_blocks: True,
    ) -> None:
        """Without `grammars` constrained requests are refused. store: of KV blocks beyond the pool, read
        where `read_rule` says so."""
        self._backend = backend
        self._config = config
        self._tokens = tokens
        self._eos_ids = eos_ids
        self._clock = clock
        self._pool = BlockPool(backend.num_blocks, backend.block_size)
        self._wants = VisualWants(visuals)
        self._scheduler = Scheduler(
            config,
            self._pool,
            self._wants,
            backend.swap_out,
            backend.swap_in,
            backend.whole_spans,
            open_saved=None
            if store is None
            else lambda prefixes: SavedPrefixes(store, self._pool, prefixes, backend, read_rule),
        )
        self._saved = self._scheduler.saved
        self._counters = EngineCounters()
        self._groups: dict[str, Group] = {}
        self._committer = Committer(
            self._scheduler, self._pool, self._wants, tokens, eos_ids, self._counters, self._groups
        )
        self._grammars = grammars
        self._compiling: list[Group] = []
        self._num_submitted = 0
        self._may_progress = False

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError, with the numbers, if it can never be served."""
        try:
            group = self._group(request)
        except RequestError:
            raise
        except Exception:
            log.exception("a request could not be taken")
            raise RequestError("internal_error", ENGINE_FAULT) from None
        if group.grammar is not None:
            self._compiling.append(group)
        self._num_submitted += 1
        self._groups[request.id] = group
        self._scheduler.add(group)
        self._may_progress = True

    def cancel(self, request_id: str) -> None:
        """Ends a request at any stage: its blocks and visual tokens are free when this returns, and no
        event of it follows. Unknown or ended requests are ignored."""
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._scheduler.remove(group, self._clock())
            self._counters.cancelled += 1
            self._may_progress = True

    def step(self) -> list[Event]:
        """One iteration; what it made known, in order. Nothing runnable: an empty step."""
        started = self._clock()
        events: list[Event] = []
        if self._compiling:
            self._start_compiled(events)
        batch = self._scheduler.plan(started)
        events += self._wants.events
        self._wants.events.clear()
        for group, code, message in batch.failures:
            self._fail(group, code, message, events)
        if batch.picks or batch.copies:
            logits = self._execute(batch, events)
            now = self._clock()
            if logits is not None:
                self._committer.commit(batch, logits, now, events)
                self._count_step(batch, now - started)
        self._may_progress = bool(batch.picks or events)
        if self._saved is not None:
            self._saved.save_some()
        if not self._may_progress:
            self._nap()
        return events

    def _nap(self) -> None:
        """Until a constraint is compiled or blocks are read, where all requests wait for such."""
        if self._compiling:
            wait([g.grammar for g in self._compiling if g.grammar], _NAP_S, return_when=FIRST_COMPLETED)
        elif self._saved is not None and self._saved.is_waiting:
            self._saved.wait(_NAP_S)

    @property
    def is_idle(self) -> bool:
        """No request at any stage."""
        return not self._groups

    @property
    def has_work(self) -> bool:
        """Whether `step` can get on now; False while every request waits for visual tokens."""
        saved = self._saved
        if saved is not None and saved.has_pending:
            return True
        return bool(self._groups) and (
            self._may_progress
            or bool(self._compiling)
            or self._wants.any_arrived()
            or (saved is not None and saved.is_waiting)
        )

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(len(group.members) for group in self._scheduler.queues.running)

    @property
    def has_interactive_running(self) -> bool:
        return any(group.priority == "interactive" for group in self._scheduler.queues.running)

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        scheduled, speculation = scheduler.counters, scheduler.speculation
        return EngineStats(
            running=self.num_running,
            waiting=len(scheduler.queues.waiting),
            kv_blocks=pool.num_blocks,
            kv_blocks_held=pool.num_held,
            kv_blocks_cached=pool.num_cached,
            evictions=pool.num_evictions,
            visuals_missing=self._wants.num_awaited,
            prefix_query_tokens=scheduled.prefix_queries,
            prefix_hit_tokens=scheduled.prefix_hits,
            preempted_recompute=scheduled.preempted_recompute,
            preempted_swap=scheduled.preempted_swap,
            drafted_tokens=0 if speculation is None else speculation.num_drafted,
            accepted_tokens=0 if speculation is None else speculation.num_accepted,
            kv_saved_read=0 if self._saved is None else self._saved.counters.read,
            kv_saved_written=0 if self._saved is None else self._saved.counters.written,
            kv_saved_dropped=0 if self._saved is None else self._saved.counters.dropped,
            **asdict(self._counters),
        )

    def clear_prefix_cache(self) -> int:
        """Forgets published blocks; running requests keep theirs. Returns blocks freed."""
        return self._pool.clear_cached()

    def check_integrity(self) -> None:
        """Raises AssertionError if bookkeeping is inconsistent; for tests and idle moments."""
        self._scheduler.check_integrity()
        queued = {id(group) for group in self._scheduler.queues.waiting + self._scheduler.queues.running}
        assert queued == {id(group) for group in self._groups.values()}, "a group is lost or left over"
        held = any(group.held for group in self._groups.values())
        assert held or self._wants.num_awaited == 0, "a visual key is awaited by no request"

    def _group(self, request: Request) -> Group:
        """Raises RequestError."""
        request = self._fitted(request)
        self._check(request)
        now = self._clock()
        params, prompt = request.params, request.prompt
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sampler = SamplerState(params, prompt.token_ids, self._backend.vocab_size, seed)
        grammar = self._compile(params)
        first = Sequence(0, list(prompt.token_ids), sampler, TextStream(self._tokens, params))
        ageing_s = self._config.ageing_s if request.priority == "batch" else 0.0
        group = Group(request, first, (now + ageing_s, self._num_submitted), now)
        if params.beam_width > 1:
            group.beam = BeamSearch(params.beam_width, params.max_tokens, self._eos_ids)
            if params.ignore_eos:
                group.beam = BeamSearch(params.beam_width, params.max_tokens, frozenset())
        group.grammar = grammar
        return group

    def _compile(self, params: SamplingParams) -> Future[Compiled] | None:
        if params.constraint is None:
            return None
        if self._grammars is None:
            raise RequestError("unsupported", "Constrained decoding is not available.", "response_format")
        if params.beam_width > 1:
            raise RequestError("unsupported", "Beam search takes no constraint.", "response_format")
        return self._grammars.compile(*params.constraint, params.skip_special_tokens)

    def _start_compiled(self, events: list[Event]) -> None:
        """Gives groups whose constraint is compiled their matchers; a refusal ends that request only."""
        assert self._grammars is not None
        waiting, self._compiling = self._compiling, []
        for group in waiting:
            if self._groups.get(group.id) is not group or group.grammar is None:
                continue
            if not group.grammar.done():
                self._compiling.append(group)
                continue
            try:
                group.members[0].matcher = self._grammars.start(
                    group.grammar, may_begin_with_space=group.request.params.drop_leading_space
                )
                group.grammar = None
            except RequestError as error:
                self._fail(group, error.code, error.message, events, error.param)

    def _execute(self, batch: StepPicks, events: list[Event]) -> Logits | None:
        try:
            return self._backend.execute(batch.plan())
        except Exception:
            # Only the requests of this step are lost: their KV is in doubt, everyone else's is not.
            log.exception("a step failed in the backend")
            self._counters.failed_steps += 1
            for group in {id(g): g for g in [pick.group for pick in batch.picks] + batch.copied}.values():
                self._fail(group, "internal_error", ENGINE_FAULT, events)
            return None

    def _fail(
        self, group: Group, code: str, message: str, events: list[Event], param: str | None = None
    ) -> None:
        if self._groups.pop(group.id, None) is not None:
            self._scheduler.remove(group, self._clock())
            self._counters.failed += 1
            events.append(Failed(group.id, code, message, param))

    def _count_step(self, batch: StepPicks, seconds: float) -> None:
        counters = self._counters
        self._scheduler.budget.observe(batch.num_decodes, batch.num_chunk_tokens, seconds)
        counters.steps += 1
        counters.slots_offered += self._config.max_running
        counters.slots_used += len(batch.picks)
        counters.chunk_tokens += batch.num_chunk_tokens
        ema = counters.step_ms_ema
        counters.step_ms_ema = seconds * 1e3 if counters.steps == 1 else ema + 0.1 * (seconds * 1e3 - ema)

    def _fitted(self, request: Request) -> Request:
        """With `max_tokens` cut to what the pool holds beside the prompt, where no client chose it."""
        params = request.params
        if not params.fit_max_tokens:
            return request
        width = max(params.n, params.beam_width)
        room = self._scheduler.most_tokens(request.prompt.num_tokens, width)
        return replace(request, params=replace(params, max_tokens=max(1, min(params.max_tokens, room))))

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt, request.params
        if request.id in self._groups:
            raise RequestError("duplicate_request_id", "A request with this id is being served.")
        _check_prompt(prompt, self._backend.vocab_size)
        check_params(params, self._backend.vocab_size)
        text, image = prompt.num_tokens - prompt.num_image_tokens, prompt.num_image_tokens
        asked = f"{text} text tokens + {image} image tokens + {params.max_tokens} to generate"
        if prompt.num_tokens + params.max_tokens > self._backend.max_positions:
            raise RequestError(
                "context_length_exceeded",
                f"{asked} exceed the context of {self._backend.max_positions} tokens.",
                "messages",
            )
        width = max(params.n, params.beam_width)
        if width > self._config.max_running:
            raise RequestError(
                "too_many_choices", f"{width} sequences exceed the limit of {self._config.max_running}.", "n"
            )
        bound = self._scheduler.blocks_bound(prompt.num_tokens, params.max_tokens, width)
        if bound > self._pool.num_blocks:
            raise RequestError(
                "kv_capacity_exceeded",
                f"{asked}, {width} sequence(s), need {bound} KV blocks of {self._pool.block_size} tokens; "
                f"there are {self._pool.num_blocks}.",
                "messages",
            )
        limit = self._config.max_image_tokens
        if limit is not None and image > limit:
            raise RequestError(
                "image_tokens_exceeded", f"{image} image tokens exceed the limit of {limit}.", "messages"
            )


def _check_prompt(prompt: Prompt, vocab_size: int) -> None:
    if not prompt.token_ids:
        raise RequestError("invalid_prompt", "The prompt is empty.", "messages")
    if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
        raise RequestError("invalid_prompt", "A token id is out of range.", "messages")
    end = 0
    for span in prompt.spans:
        if span.start < end or span.length < 1 or span.offset < 0:
            raise RequestError(
                "invalid_prompt", "Image spans must be sorted, disjoint and not empty.", "messages"
            )
        if span.shape is not None and (min(span.shape) < 1 or math.prod(span.shape) != span.length):
            raise RequestError("invalid_prompt", "An image span's shape must have its length.", "messages")
        end = span.start + span.length
    if end > prompt.num_tokens:
        raise RequestError("invalid_prompt", "An image span exceeds the prompt.", "messages")
