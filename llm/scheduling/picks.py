"""What one step computes: the tokens of which running sequences, under one budget."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from llm.backend.base import StepItem, StepPlan, VisualSlice
from llm.engine_config import EngineConfig
from llm.rope_positions import rope_positions
from llm.scheduling.budget import StepBudget
from llm.scheduling.sequence import Group, Sequence
from llm.scheduling.visual_wants import VisualFailure, VisualWants


@dataclass(slots=True)
class Pick:
    """Positions [start, start + num_tokens) of one sequence, computed in this step."""

    group: Group
    seq: Sequence
    num_tokens: int
    num_logits: int
    visuals: tuple[VisualSlice, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()  # of the sequence's image spans, those that end in this pick


@dataclass(slots=True)
class StepPicks:
    """One step, decided: what to execute and whom it serves, in item order."""

    picks: list[Pick] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    copied: list[Group] = field(default_factory=list)  # groups that `copies` serve
    failures: list[tuple[Group, str, str]] = field(default_factory=list)
    num_decodes: int = 0
    num_chunk_tokens: int = 0

    def plan(self) -> StepPlan:
        return StepPlan(tuple([_item(pick) for pick in self.picks]), tuple(self.copies))


def _item(pick: Pick) -> StepItem:
    seq, start = pick.seq, pick.seq.num_computed
    end = start + pick.num_tokens
    if pick.num_tokens == 1:
        token_ids: tuple[int, ...] = (seq.tokens[start],)
    else:
        token_ids = tuple(seq.tokens[start:end])
        if end > len(seq.tokens):
            token_ids += seq.draft[: end - len(seq.tokens)]
    rope = rope_positions(pick.group.spans, start, end)
    return StepItem(token_ids, start, tuple(seq.table), pick.num_logits, pick.visuals, pick.whole, rope)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence that catches up; positions below `end` may be computed."""

    group: Group
    seq: Sequence
    end: int


class Picker:
    """Decodes first, each of them; then chunks in the groups' order, under the step's token budget.

    Interactive prompts are served before batch work: a step that computes one carries no batch sequence that
    ranks behind it, so its first token waits for the step under way and for nothing else. Batch sequences
    keep their blocks and go on in the next step without such a prompt, at the latest once they have aged
    (`Group.order`). A step of batch work alone takes at most `max_batch_chunk_tokens` of prompts, which
    keeps the step under way short.

    `whole_spans`: positions of an image span see each other, so a chunk never ends inside one. It ends before
    the span, or takes all that is left of it: beyond the budget where it must, but then as the step's only
    chunk. Bound: a step's prompt tokens are at most the larger of its budget and the longest such span.
    """

    def __init__(
        self, config: EngineConfig, wants: VisualWants, budget: StepBudget, whole_spans: bool = False
    ) -> None:
        self._whole_spans = whole_spans
        self._config = config
        self._wants = wants
        self._budget = budget

    def pick(self, running: Series[Group], batch: StepPicks, now: float) -> None:
        decodes: list[Pick] = []
        chunks: list[_Chunk] = []
        for group in running:
            _sort(group, decodes, chunks)
        first_tokens = [pick.group for pick in decodes if _is_first_token(pick)]  # all but one were cached
        urgent = first_tokens + [chunk.group for chunk in chunks if chunk.group.priority == "interactive"]
        if urgent:
            last = max(group.order for group in urgent)
            ahead = [chunk for chunk in chunks if chunk.group.order <= last]
            self._take([pick for pick in decodes if _goes_along(pick.group, last)], ahead, batch, now)
            if batch.num_chunk_tokens or first_tokens:
                return
            chunks = chunks[len(ahead) :]  # those tried have nothing that can be computed now
        self._take(decodes, chunks, batch, now)

    def _take(self, decodes: list[Pick], chunks: Series[_Chunk], batch: StepPicks, now: float) -> None:
        batch.picks = decodes
        batch.num_decodes = len(decodes)
        if not chunks:
            return
        left = self._budget.chunk_tokens(sum(pick.num_tokens for pick in decodes))
        groups = [pick.group for pick in decodes] + [chunk.group for chunk in chunks]
        if all(group.priority == "batch" for group in groups):
            left = min(left, self._config.max_batch_chunk_tokens)
        rows_left = self._config.max_logit_rows
        for chunk in chunks:
            if left <= 0:
                break
            try:
                pick = self._cut(chunk, left, rows_left, now, not batch.num_chunk_tokens)
            except VisualFailure as failure:
                batch.failures.append((chunk.group, failure.code, failure.message))
                continue
            if pick is None:
                continue
            batch.picks.append(pick)
            batch.num_chunk_tokens += pick.num_tokens
            left -= pick.num_tokens
            if _is_scored(chunk):
                rows_left -= pick.num_logits

    def _cut(
        self, chunk: _Chunk, tokens_left: int, rows_left: int, now: float, is_first: bool
    ) -> Pick | None:
        """As much of a chunk as fits and has its visual tokens; the first of a step may be a span that does
        not fit. Raises VisualFailure."""
        group, seq = chunk.group, chunk.seq
        start = seq.num_computed
        end = min(chunk.end, start + tokens_left)
        if _is_scored(chunk):
            end = min(end, start + rows_left)
        visuals: tuple[VisualSlice, ...] = ()
        whole: tuple[tuple[int, int], ...] = ()
        if start < group.spans_end:
            if self._whole_spans:
                limit, end = end, _without_half_a_span(group, start, end)
                if end > limit and not is_first:
                    return None
            end, visuals = self._wants.slices(group, start, end, now)
            if self._whole_spans:
                whole = _spans_within(group, start, end)
        if end <= start:
            return None
        num_logits = end - start if _is_scored(chunk) else int(end == len(seq.tokens))
        return Pick(group, seq, end - start, num_logits, visuals, whole)


def _without_half_a_span(group: Group, start: int, end: int) -> int:
    """Where a chunk from `start` that may reach `end` ends: before the span that it would cut, or behind it
    where nothing comes before."""
    for span in group.spans:
        if span.start < end < span.start + span.length:
            return span.start if span.start > start else span.start + span.length
    return end


def _spans_within(group: Group, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Image spans, or what is left of them, that [start, end) holds up to their ends."""
    spans = [(span.start, span.start + span.length) for span in group.spans]
    assert not any(first < end < last for first, last in spans), "half a span"
    return tuple((first, last) for first, last in spans if start < last <= end)


def _sort(group: Group, decodes: list[Pick], chunks: list[_Chunk]) -> None:
    """Appends the group's members to whichever they are in the next step."""
    members = group.scheduled_members
    lockstep = group.beam is not None and len(group.members) > 1
    waits = lockstep and (not group.attached or any(seq.num_pending > 1 for seq in members))
    for seq in members:
        if waits:
            end = len(seq.tokens) - 1 if group.attached else (group.fork_at or 0)
            if end > seq.num_computed:
                chunks.append(_Chunk(group, seq, end))
        elif seq.num_pending == 1 and group.attached and seq.num_computed >= group.spans_end:
            num_tokens = 1 + len(seq.draft)
            decodes.append(Pick(group, seq, num_tokens, num_tokens))
        else:
            chunks.append(_Chunk(group, seq, len(seq.tokens) if group.attached else (group.fork_at or 0)))


def _is_first_token(pick: Pick) -> bool:
    return pick.group.priority == "interactive" and pick.seq.num_generated == 0


def _goes_along(group: Group, last: tuple[float, int]) -> bool:
    return group.priority == "interactive" or group.order < last


def _is_scored(chunk: _Chunk) -> bool:
    group = chunk.group
    return group.request.params.prompt_logprobs is not None and group.num_scored < chunk.seq.num_prompt
