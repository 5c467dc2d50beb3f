"""Which sequences run in the next step, on which blocks. Decides; never touches a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llm.admission import Admission
from llm.backend.base import StepItem, StepPlan, VisualSlice
from llm.blocks import BlockPool
from llm.budget import StepBudget
from llm.engine_config import EngineConfig
from llm.preempt import Preemption
from llm.prefix import NoPrefixCache, PrefixCache, Prefixes
from llm.queues import Queues, SchedulerCounters, order_of
from llm.sequence import Group, Sequence
from llm.speculate import NGramDraft, Speculation
from llm.visual_wants import VisualFailure, VisualWants


@dataclass(slots=True)
class Pick:
    """Positions [start, start + num_tokens) of one sequence, computed in this step."""

    group: Group
    seq: Sequence
    num_tokens: int
    num_logits: int
    visuals: tuple[VisualSlice, ...] = ()


@dataclass(slots=True)
class Batch:
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
    return StepItem(token_ids, start, tuple(seq.table), pick.num_logits, pick.visuals)


class Scheduler:
    """Admits, grows, picks; each pass goes through the groups in `Group.order`.

    1. admit: waiting groups, as long as slots and blocks for their whole known demand are there;
    2. grow: every running group gets the blocks that its tokens need, the last running group is preempted
       when none are left, so a group already served in this pass is never taken from;
    3. pick: decodes first, each of them; then chunks, under the step's token budget.
    Bounds, held in every history: a running sequence that only lacks its last token's KV is in every step;
    a batch request is overtaken only by interactive ones submitted less than `ageing_s` after it.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        wants: VisualWants,
        swap_out: Callable[[tuple[int, ...]], Any],
        swap_in: Callable[[Any, tuple[int, ...]], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._wants = wants
        self.prefixes: Prefixes = PrefixCache(pool) if config.prefix_cache else NoPrefixCache()
        self.counters = SchedulerCounters()
        self.queues = Queues()
        self.budget = StepBudget(
            config.max_step_tokens, config.min_chunk_tokens, config.step_stretch, config.max_step_ms / 1e3
        )
        self.speculation: Speculation | None = None
        if config.speculation == "ngram":
            self.speculation = Speculation(NGramDraft, config.num_draft, config.speculation_rule)
        self.preemption = Preemption(
            config, pool, self.prefixes, wants, self.queues, self.counters, swap_out, swap_in
        )
        self._admission = Admission(
            config, pool, self.prefixes, wants, self.queues, self.counters, self.preemption
        )

    def add(self, group: Group) -> None:
        self.queues.enqueue(group)

    def remove(self, group: Group, now: float) -> None:
        """Forgets a group at any stage; its blocks and holds are free at once."""
        self.queues.remove(group)
        for seq in group.members:
            self._pool.release(seq.forget_blocks())
        group.swapped = None
        self.prefixes.disclaim(group)
        self._wants.release_all(group, now)

    def blocks_bound(self, num_prompt: int, max_tokens: int, width: int) -> int:
        """Most blocks a request can ever hold: its prompt's full blocks once, the rest per sequence."""
        shared = num_prompt // self._pool.block_size
        return shared + width * (self._pool.blocks_for(num_prompt + max_tokens) - shared)

    def plan(self, now: float) -> Batch:
        batch = Batch()
        batch.failures += self._wants.settle(now)
        batch.failures += self._admission.admit(now)
        if self.speculation is not None:
            self.speculation.propose(self.queues.running, self._pool.num_available, self._pool.block_size)
        self._grow(batch, now)
        self._pick(batch, now)
        return batch

    # 2. grow

    def _grow(self, batch: Batch, now: float) -> None:
        index = 0
        while index < len(self.queues.running):
            group = self.queues.running[index]
            need = self._num_needed(group)
            if need > self._pool.num_available and any(seq.draft for seq in group.members):
                for seq in group.members:
                    seq.draft = ()
                need = self._num_needed(group)
            while need > self._pool.num_available and self.queues.running[-1] is not group:
                self.preemption.preempt(self.queues.running[-1], now)
            if need > self._pool.num_available:
                self.preemption.preempt(group, now)
                break
            if need or group.fork_at is not None:
                self._extend(group, batch)
            index += 1

    def _num_needed(self, group: Group) -> int:
        size, need = self._pool.block_size, 0
        for seq in group.scheduled_members:
            target = self._target(group, seq)
            if target > len(seq.table) * size:
                need += -(-target // size) - len(seq.table)
        if group.fork_at is not None:
            need += len(self._tail_writers(group))
        return need

    def _target(self, group: Group, seq: Sequence) -> int:
        if not group.attached and group.fork_at is not None:
            return group.fork_at
        return len(seq.tokens) + len(seq.draft)

    def _tail_writers(self, group: Group) -> list[Sequence]:
        """Members about to write into a block that others still hold; the last holder writes in place."""
        writers = []
        left: dict[int, int] = {}
        for seq in group.scheduled_members:
            if not seq.shares_tail:
                continue
            block = seq.table[seq.num_computed // self._pool.block_size]
            holders = left.get(block, self._pool.refs[block])
            if holders > 1:
                writers.append(seq)
            left[block] = holders - 1
        return writers

    def _extend(self, group: Group, batch: Batch) -> None:
        pool = self._pool
        if group.fork_at is not None:
            for seq in self._tail_writers(group):
                index = seq.num_computed // pool.block_size
                source, target = seq.table[index], pool.allocate(1)[0]
                batch.copies.append((source, target))
                batch.copied.append(group)
                seq.table[index] = target
                pool.release([source])
            for seq in group.scheduled_members:
                seq.shares_tail = False
        for seq in group.scheduled_members:
            missing = pool.blocks_for(self._target(group, seq)) - len(seq.table)
            if missing > 0:
                seq.table += pool.allocate(missing)

    # 3. pick

    def _pick(self, batch: Batch, now: float) -> None:
        chunks: list[tuple[Group, Sequence, int]] = []  # up to which position
        for group in self.queues.running:
            members = group.scheduled_members
            lockstep = group.beam is not None and len(group.members) > 1
            waits = lockstep and (not group.attached or any(seq.num_pending > 1 for seq in members))
            for seq in members:
                pending = len(seq.tokens) - seq.num_computed
                if waits:
                    end = len(seq.tokens) - 1 if group.attached else (group.fork_at or 0)
                    if end > seq.num_computed:
                        chunks.append((group, seq, end))
                elif pending == 1 and group.attached and seq.num_computed >= group.spans_end:
                    num_tokens = 1 + len(seq.draft)
                    batch.picks.append(Pick(group, seq, num_tokens, num_tokens))
                else:
                    chunks.append((group, seq, len(seq.tokens) if group.attached else (group.fork_at or 0)))
        batch.num_decodes = len(batch.picks)
        if chunks:
            self._pick_chunks(batch, chunks, now)

    def _pick_chunks(self, batch: Batch, chunks: list[tuple[Group, Sequence, int]], now: float) -> None:
        left = self.budget.chunk_tokens(sum(pick.num_tokens for pick in batch.picks))
        rows_left = self._config.max_logit_rows
        for group, seq, end in chunks:
            if left <= 0:
                break
            start = seq.num_computed
            end = min(end, start + left)
            scored = group.request.params.prompt_logprobs is not None and group.num_scored < seq.num_prompt
            if scored:
                end = min(end, start + rows_left)
            visuals: tuple[VisualSlice, ...] = ()
            if start < group.spans_end:
                try:
                    end, visuals = self._wants.slices(group, start, end, now)
                except VisualFailure as failure:
                    batch.failures.append((group, failure.code, failure.message))
                    continue
            if end <= start:
                continue
            num_logits = 1 if end == len(seq.tokens) else 0
            if scored:
                num_logits = end - start
                rows_left -= num_logits
            batch.picks.append(Pick(group, seq, end - start, num_logits, visuals))
            batch.num_chunk_tokens += end - start
            left -= end - start

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks, claims or ranks are out of order."""
        size = self._pool.block_size
        self._pool.check_integrity([seq.table for group in self.queues.running for seq in group.members])
        for groups in (self.queues.waiting, self.queues.running):
            assert groups == sorted(groups, key=order_of), "ranks"
        for group in self.queues.waiting:
            assert not any(seq.table for seq in group.members) and not group.claims, (
                "a waiting group holds blocks"
            )
        for group in self.queues.running:
            for seq in group.scheduled_members:
                assert seq.num_published * size <= seq.num_computed <= len(seq.table) * size, "intervals"
                assert seq.num_computed < len(seq.tokens), "nothing left to compute"
        num_claims = sum(len(group.claims) for group in self.queues.running)
        assert self.prefixes.num_claims <= num_claims, "a claim without an owner"
