"""After a step: KV is written, so blocks are published, tokens drawn, text shown, sequences ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np

from llm.backend.base import Logits, greedy, largest
from llm.beam_rounds import BeamRounds, beam_text
from llm.engine_stats import EngineCounters, timings_of, usage_of
from llm.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    RequestError,
)
from llm.sampling.sampler import token_logprob
from llm.scheduling.blocks import BlockPool
from llm.scheduling.picks import Pick, StepPicks
from llm.scheduling.scheduler import Scheduler
from llm.scheduling.sequence import Group, Sequence
from llm.scheduling.visual_wants import VisualWants
from llm.text.outputs import TextStream, TokenText

log = logging.getLogger(__name__)

ENGINE_FAULT = "The engine failed while it worked on this request."
_NO_NUMBERS = "The model gave no usable numbers for this request."


class Committer:
    """Applies a step's logits to its sequences and says what happened."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        wants: VisualWants,
        tokens: TokenText,
        eos_ids: frozenset[int],
        counters: EngineCounters,
        groups: dict[str, Group],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._wants = wants
        self._tokens = tokens
        self._eos_ids = eos_ids
        self._counters = counters
        self._groups = groups
        self._beams = BeamRounds(pool)

    def commit(self, batch: StepPicks, logits: Logits, now: float, events: list[Event]) -> None:
        """`logits`: [sum of num_logits, vocab], in pick order. What a request's own settings raise
        ends that request."""
        best, usable = greedy(logits)
        beams: dict[int, tuple[Group, list[np.ndarray]]] = {}
        row = 0
        for pick in batch.picks:
            mine = slice(row, row + pick.num_logits)
            row += pick.num_logits
            with self._blaming(pick.group, now, events) as is_alive:
                if not is_alive:  # a sibling failed in this step
                    continue
                if not usable[mine].all():
                    raise RequestError("internal_error", _NO_NUMBERS)
                self._take(pick, logits[mine], best[mine].tolist(), beams, now, events)
        for group, group_rows in beams.values():
            with self._blaming(group, now, events) as is_alive:
                if is_alive:
                    self._advance_beams(group, group_rows, now, events)

    @contextlib.contextmanager
    def _blaming(self, group: Group, now: float, events: list[Event]) -> Iterator[bool]:
        """Gives whether the group is alive; ends it if something is raised."""
        try:
            yield self._groups.get(group.id) is group
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a request failed after its step")
                error = RequestError("internal_error", ENGINE_FAULT)
            if self._groups.get(group.id) is group:
                self._refuse(group, error, now, events)

    def _take(
        self,
        pick: Pick,
        rows: Logits,
        best: list[int],
        beams: dict[int, tuple[Group, list[np.ndarray]]],
        now: float,
        events: list[Event],
    ) -> None:
        """One pick's logits: its tokens, or its row for the beams of its group."""
        group, seq = pick.group, pick.seq
        if seq.draft:
            self._verify(pick, rows, best, now, events)
            return
        self._advance(pick, rows, now, events)
        if not pick.num_logits or seq.num_computed != len(seq.tokens):
            return
        if group.beam is not None:
            beams.setdefault(id(group), (group, []))[1].append(rows[-1])
        elif group.width == 1 and self._is_plain(group, seq):
            self._accept(group, seq, best[-1], rows[len(rows) - 1 :], now, events)
        else:
            self._draw(group, seq, rows[len(rows) - 1 :], now, events)

    def _advance_beams(self, group: Group, rows: list[np.ndarray], now: float, events: list[Event]) -> None:
        group.first_token_s = now if group.first_token_s is None else group.first_token_s
        group.last_token_s = now
        if self._beams.advance(group, rows):
            self._finish_beams(group, now, events)

    def _verify(self, pick: Pick, rows: Logits, best: list[int], now: float, events: list[Event]) -> None:
        """Draws at each position as if there were no draft, for as long as the draw agrees with it. KV that
        was written for wrong guesses lies beyond `num_computed` and is written again."""
        group, seq, speculation = pick.group, pick.seq, self._scheduler.speculation
        draft, seq.draft = (*seq.draft, None), ()
        num_accepted = 0
        for index, (guess, likeliest) in enumerate(zip(draft, best, strict=True)):
            row = rows[index : index + 1]
            seq.num_computed += 1
            self._scheduler.prefixes.publish(group, seq)
            token_id = likeliest if self._is_plain(group, seq) else self._sample(group, seq, row)
            num_accepted += token_id == guess
            if self._accept(group, seq, token_id, row, now, events) or token_id != guess:
                break
        if speculation is not None:
            speculation.observe(seq, len(draft) - 1, num_accepted)

    def _advance(self, pick: Pick, rows: Logits, now: float, events: list[Event]) -> None:
        """The pick's KV is written: publish full blocks, let go of images that were read."""
        group, seq = pick.group, pick.seq
        start = seq.num_computed
        seq.num_computed = start + pick.num_tokens
        self._scheduler.prefixes.publish(group, seq)
        if group.held:
            self._wants.release_before(group, seq.num_computed, now)
        if not group.attached:
            self._scheduler.preemption.attach_if_ready(group)
        num_top = group.request.params.prompt_logprobs
        if num_top is not None and group.num_scored < seq.num_prompt:
            self._score_prompt(group, seq, start, rows, num_top, events)

    def _score_prompt(
        self, group: Group, seq: Sequence, start: int, rows: Logits, num_top: int, events: list[Event]
    ) -> None:
        """Row i, of position start + i, scores the token after it; positions reported before are skipped."""
        scores = []
        for position in range(max(start, group.num_scored), start + len(rows)):
            if position + 1 < seq.num_prompt:
                scores.append(token_logprob(rows[position - start], seq.tokens[position + 1], num_top))
        group.num_scored = max(group.num_scored, start + len(rows))
        if scores:
            events.append(PromptLogprobs(group.id, tuple(scores)))

    def _draw(self, group: Group, seq: Sequence, row: Logits, now: float, events: list[Event]) -> None:
        if group.width > 1 and group.fork_at is None:
            self._fork_choices(group, seq)
            for member in list(group.members):
                self._accept(group, member, self._sample(group, member, row), row, now, events)
            return
        self._accept(group, seq, self._sample(group, seq, row), row, now, events)

    @staticmethod
    def _is_plain(group: Group, seq: Sequence) -> bool:
        """The likeliest token is the next one, whatever it is."""
        too_short = seq.num_generated < group.request.params.min_tokens
        return seq.sampler.is_plain_greedy and seq.matcher is None and not too_short

    def _without_ends(self, group: Group, seq: Sequence, mask: np.ndarray | None) -> np.ndarray:
        """A mask without end tokens, unless a grammar leaves nothing else."""
        allowed = np.ones(seq.sampler.vocab_size, bool) if mask is None else mask.copy()
        ends = (*self._eos_ids, *group.request.params.stop_token_ids)
        allowed[[end for end in ends if end < len(allowed)]] = False
        return allowed if mask is None or allowed.any() else mask

    def _sample(self, group: Group, seq: Sequence, row: Logits) -> int:
        """`row`: the logits of one row."""
        mask = None
        if seq.matcher is not None:
            mask = seq.matcher.mask(ignore_eos=group.request.params.ignore_eos)
        if seq.num_generated < group.request.params.min_tokens:
            mask = self._without_ends(group, seq, mask)
        if (
            mask is None
            and seq.sampler.num_candidates
            and (top := largest(row, 0, seq.sampler.num_candidates))
        ):
            return seq.sampler.sample_among(*top, seq.num_generated)
        return seq.sampler.sample(row[0], seq.num_generated, mask)

    def _fork_choices(self, group: Group, seq: Sequence) -> None:
        """The prompt is computed once; every choice goes on from its blocks."""
        params = group.request.params
        for choice in range(1, group.width):
            group.members.append(seq.fork(choice, TextStream(self._tokens, params)))
            self._pool.retain(seq.table)
        group.fork_at = seq.num_computed
        for member in group.members:
            member.shares_tail = seq.num_computed % self._pool.block_size != 0

    def _accept(
        self, group: Group, seq: Sequence, token_id: int, row: Logits, now: float, events: list[Event]
    ) -> bool:
        """One token joins a sequence; ends it at an end token, a stop string, its grammar's end or its last
        token. Returns whether it ended."""
        params = group.request.params
        seq.tokens.append(token_id)
        if not seq.sampler.is_plain_greedy:
            seq.sampler.observe(token_id)
        self._counters.generated_tokens += 1
        if group.first_token_s is None:
            group.first_token_s = now
        group.last_token_s = now
        reason: FinishReason | None = None
        text, stopped = "", False
        if (
            token_id in self._eos_ids and (not params.ignore_eos or seq.matcher is not None)
        ) or token_id in params.stop_token_ids:
            reason = "stop"
        else:
            if seq.matcher is not None:
                seq.matcher.accept(token_id)
            text, stopped = seq.text.push(token_id)
            if stopped or (seq.matcher is not None and seq.matcher.is_complete):
                reason = "stop"
            elif len(seq.tokens) - seq.num_prompt >= params.max_tokens:
                reason = "length"
        if reason is not None and not stopped:
            rest, stopped = seq.text.flush()
            text += rest
            if stopped:
                reason = "stop"
        logprobs = () if params.logprobs is None else (token_logprob(row[0], token_id, params.logprobs),)
        events.append(Delta(group.id, seq.choice, (token_id,), text, logprobs))
        if reason is not None:
            self._finish(group, seq, reason, now, events)
        return reason is not None

    def _finish(
        self, group: Group, seq: Sequence, reason: FinishReason, now: float, events: list[Event]
    ) -> None:
        group.num_completion += seq.num_generated
        group.num_longest = max(group.num_longest, seq.num_generated)
        group.members.remove(seq)
        self._pool.release(seq.forget_blocks())
        if reason == "stop":
            self._counters.finished_stop += 1
        else:
            self._counters.finished_length += 1
        if group.members:
            events.append(Finished(group.id, seq.choice, reason))
            return
        self._end(group, now)
        events.append(Finished(group.id, seq.choice, reason, usage_of(group), timings_of(group, now)))

    def _refuse(self, group: Group, error: RequestError, now: float, events: list[Event]) -> None:
        self._end(group, now)
        self._counters.failed += 1
        events.append(Failed(group.id, error.code, error.message, error.param))

    def _end(self, group: Group, now: float) -> None:
        del self._groups[group.id]
        self._scheduler.remove(group, now)

    def _finish_beams(self, group: Group, now: float, events: list[Event]) -> None:
        """Tells the best n hypotheses as choices; their text is cut at the first stop string."""
        params, beam = group.request.params, group.beam
        assert beam is not None
        chosen = beam.finished[: params.n]
        texts = [beam_text(hypothesis, params, self._tokens, self._eos_ids) for hypothesis in chosen]
        group.num_completion = sum(len(hypothesis.token_ids) for hypothesis in chosen)
        group.num_longest = max(len(hypothesis.token_ids) for hypothesis in chosen)
        self._counters.generated_tokens += group.num_completion
        self._end(group, now)
        for choice, (hypothesis, (text, reason)) in enumerate(zip(chosen, texts, strict=True)):
            events.append(Delta(group.id, choice, hypothesis.token_ids, text, hypothesis.logprobs))
            if reason == "stop":
                self._counters.finished_stop += 1
            else:
                self._counters.finished_length += 1
            is_last = choice + 1 == len(chosen)
            usage, timings = (usage_of(group), timings_of(group, now)) if is_last else (None, None)
            events.append(Finished(group.id, choice, reason, usage, timings))
