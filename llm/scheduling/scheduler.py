"""Which sequences run in the next step, on which blocks. Decides; never touches a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm.engine_config import EngineConfig
from llm.sampling.draft import NGramDraft
from llm.scheduling.blocks import BlockPool
from llm.scheduling.budget import StepBudget
from llm.scheduling.picks import Picker, StepPicks
from llm.scheduling.preempt import Preemption
from llm.scheduling.prefix import NoPrefixCache, PrefixCache, Prefixes
from llm.scheduling.queues import Queues, SchedulerCounters, order_of
from llm.scheduling.saved_prefixes import SavedPrefixes
from llm.scheduling.sequence import Group, Sequence
from llm.scheduling.sequence_admission import SequenceAdmission
from llm.scheduling.speculate import Speculation
from llm.scheduling.visual_wants import VisualWants


class Scheduler:
    """Admits, grows, picks; each pass goes through the groups in `Group.order`.

    1. admit: waiting groups, as long as slots and blocks for their whole known demand are there;
    2. grow: every running group gets the blocks that its tokens need, the last running group is preempted
       when none are left, so a group already served in this pass is never taken from;
    3. pick: decodes first, then chunks, under the step's token budget; batch work stays out of a step that
       computes an interactive prompt (`Picker`).
    Bounds, held in every history: an interactive sequence that only lacks its last token's KV is in every
    step; a batch request is overtaken only by interactive ones submitted less than `ageing_s` after it.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        wants: VisualWants,
        swap_out: Callable[[tuple[int, ...]], Any],
        swap_in: Callable[[Any, tuple[int, ...]], None],
        whole_spans: bool = False,
        open_saved: Callable[[PrefixCache], SavedPrefixes] | None = None,
    ) -> None:
        """open_saved: prefixes beyond the pool, beside its cache."""
        self._config = config
        self._pool = pool
        self._wants = wants
        cache = PrefixCache(pool) if config.prefix_cache else None
        self.prefixes: Prefixes = cache or NoPrefixCache()
        self.saved = open_saved(cache) if open_saved is not None and cache is not None else None
        self.counters = SchedulerCounters()
        self.queues = Queues()
        self.budget = StepBudget(
            config.max_step_tokens,
            config.min_chunk_tokens,
            config.step_stretch,
            config.max_step_ms / 1e3,
            config.min_alone_tokens,
        )
        self.speculation: Speculation | None = None
        if config.speculation == "ngram":
            self.speculation = Speculation(NGramDraft, config.num_draft, config.speculation_rule)
        self.preemption = Preemption(
            config, pool, self.prefixes, wants, self.queues, self.counters, swap_out, swap_in
        )
        self._picker = Picker(config, wants, self.budget, whole_spans)
        self._admission = SequenceAdmission(
            config, pool, self.prefixes, wants, self.queues, self.counters, self.preemption, self.saved
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
        if self.saved is not None:
            self.saved.forget(group)
        self._wants.release_all(group, now)

    def blocks_bound(self, num_prompt: int, max_tokens: int, width: int) -> int:
        """Most blocks a request can ever hold: its prompt's full blocks once, the rest per sequence."""
        shared = num_prompt // self._pool.block_size
        return shared + width * (self._pool.blocks_for(num_prompt + max_tokens) - shared)

    def most_tokens(self, num_prompt: int, width: int) -> int:
        """Largest `max_tokens` whose `blocks_bound` the pool holds; below 1 where there is none."""
        shared = num_prompt // self._pool.block_size
        own = (self._pool.num_blocks - shared) // width
        return (shared + own) * self._pool.block_size - num_prompt

    def plan(self, now: float) -> StepPicks:
        batch = StepPicks()
        batch.failures += self._wants.settle(now)
        batch.failures += self._admission.admit(now)
        if self.speculation is not None:
            self.speculation.propose(self.queues.running, self._pool.num_available, self._pool.block_size)
        self._grow(batch, now)
        self._picker.pick(self.queues.running, batch, now)
        return batch

    # 2. grow

    def _grow(self, batch: StepPicks, now: float) -> None:
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

    def _extend(self, group: Group, batch: StepPicks) -> None:
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
