"""Which sequences run in the next step, on which blocks. Decides; never touches a tensor."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llm.backend.base import StepItem, StepPlan, VisualSlice
from llm.blocks import BlockPool
from llm.budget import StepBudget
from llm.engine_config import EngineConfig
from llm.prefix import NoPrefixCache, PrefixCache
from llm.sequence import Group, Sequence, SwappedBlocks
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


def _order(group: Group) -> tuple[float, int]:
    return group.order


@dataclass
class SchedulerCounters:
    preempted_recompute: int = 0
    preempted_swap: int = 0
    prefix_queries: int = 0  # prompt tokens of admitted requests
    prefix_hits: int = 0  # of these, found in the cache


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
        self._swap_out = swap_out
        self._swap_in = swap_in
        self.prefixes: PrefixCache | NoPrefixCache = (
            PrefixCache(pool) if config.prefix_cache else NoPrefixCache()
        )
        self.budget = StepBudget(
            config.max_step_tokens, config.min_chunk_tokens, config.step_stretch, config.max_step_ms / 1e3
        )
        self.counters = SchedulerCounters()
        self.waiting: list[Group] = []  # both in ascending order
        self.running: list[Group] = []

    def add(self, group: Group) -> None:
        insort(self.waiting, group, key=_order)

    def remove(self, group: Group, now: float) -> None:
        """Forgets a group at any stage; its blocks and holds are free at once."""
        for groups in (self.waiting, self.running):
            if group in groups:
                groups.remove(group)
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
        self._admit(batch, now)
        self._grow(batch, now)
        self._pick(batch, now)
        return batch

    # 1. admit

    def _admit(self, batch: Batch, now: float) -> None:
        if not self.waiting or (self._config.batching == "static" and self.running):
            return
        has_room = True
        num_wanting = 0
        for group in list(self.waiting):
            if not has_room and num_wanting >= self._config.visual_lookahead:
                break
            try:
                if not has_room:
                    num_wanting += self._look_ahead(group, now)
                elif not self._is_stuck(group, num_wanting):
                    num_hits = self._num_hits(group)
                    if num_hits is None:
                        continue
                    if self._has_visuals(group, num_hits, num_wanting, now):
                        has_room = self._try_start(group, num_hits, now)
                    else:
                        num_wanting += group.considered
                elif group.missing_visual is not None:
                    num_wanting += group.considered
            except VisualFailure as failure:
                batch.failures.append((group, failure.code, failure.message))

    def _is_stuck(self, group: Group, num_wanting: int) -> bool:
        """Constant-time check of what the group waited for last time."""
        if group.blocked_on is not None:
            owner = self.prefixes.owner(group.blocked_on)
            if owner is not None:
                self._lend_order(owner, group)
                return True
            group.blocked_on = None
        if group.missing_visual is None or self._wants.is_settled(group.missing_visual):
            return False
        if not group.considered and num_wanting < self._config.visual_lookahead:
            return False
        return group.next_key is None or not self.prefixes.is_published(group.next_key)

    def _match_limit(self, group: Group) -> int:
        """Blocks a hit may cover: never the last token, never what needs its logits again."""
        if group.swapped is not None or (
            group.request.params.prompt_logprobs is not None
            and group.num_scored < group.members[0].num_prompt
        ):
            return 0
        size = self._pool.block_size
        if not group.attached and group.fork_at is not None:
            return group.fork_at // size
        return (len(group.members[0].tokens) - 1) // size

    def _num_hits(self, group: Group) -> int | None:
        """Blocks in the prefix cache, or None while another group computes the next one."""
        seq, limit = group.members[0], self._match_limit(group)
        num_hits = len(self.prefixes.match(group, seq, limit)) if limit else 0
        group.next_key = self.prefixes.next_key(seq, num_hits, limit)
        if group.next_key is not None:
            owner = self.prefixes.owner(group.next_key)
            if owner is not None and owner is not group:
                group.blocked_on = group.next_key
                self._lend_order(owner, group)
                return None
        return num_hits

    def _lend_order(self, owner: Group, waiter: Group) -> None:
        """Whoever computes blocks for an earlier request is served as early as that one."""
        if waiter.order < owner.order:
            owner.order = (waiter.order[0], waiter.order[1])
            self.running.sort(key=_order)

    def _has_visuals(self, group: Group, num_hits: int, num_wanting: int, now: float) -> bool:
        """Whether enough visual tokens are there to start: all, or a block's worth before the first missing."""
        start = group.members[0].num_computed if group.swapped else num_hits * self._pool.block_size
        if start >= group.spans_end or group.swapped is not None:
            return True
        if not group.considered and num_wanting >= self._config.visual_lookahead:
            group.missing_visual = self._wants.is_covered(group, start)
            if group.missing_visual is not None:
                return False
        group.considered = True
        missing_at = self._wants.ensure(group, start, now)
        return missing_at is None or missing_at - start >= self._pool.block_size

    def _look_ahead(self, group: Group, now: float) -> int:
        """No room for the group yet: ask for its images all the same. Returns whether it waits for some."""
        if not group.spans or group.swapped is not None:
            return 0
        if not group.considered:
            num_hits = self._num_hits(group)
            if num_hits is None:
                return 0
            group.considered = True
            self._wants.ensure(group, num_hits * self._pool.block_size, now)
        return 1

    def _demand(self, group: Group) -> int:
        """Blocks for all tokens known now, shared ones once."""
        bound = self._pool.blocks_for
        if group.swapped is not None:
            growth = [
                bound(len(seq.tokens)) - len(indices) + seq.shares_tail
                for seq, indices in zip(group.members, group.swapped.tables, strict=True)
            ]
            return group.swapped.count + sum(growth) - any(seq.shares_tail for seq in group.members)
        if group.attached:
            return bound(len(group.members[0].tokens))
        shared = (group.fork_at or 0) // self._pool.block_size
        return shared + sum(bound(len(seq.tokens)) - shared for seq in group.members)

    def _try_start(self, group: Group, num_hits: int, now: float) -> bool:
        """Admits if slots and blocks allow, preempting later batch work for an interactive request."""
        seq = group.members[0]
        hits = self.prefixes.match(group, seq, num_hits) if num_hits else []
        idle_hits = sum(1 for block in hits if self._pool.refs[block] == 0)
        slots = self._config.max_running - sum(other.num_slots for other in self.running) - group.num_slots
        # Headroom: each running sequence may need one block more in the next step.
        headroom = sum(len(other.members) for other in self.running)
        spare = self._pool.num_available - idle_hits - (self._demand(group) - len(hits)) - headroom
        victims: list[Group] = []
        if slots < 0 or spare < 0:
            if group.request.priority != "interactive":
                return False
            for other in reversed(self.running):
                if other.order < group.order or other.request.priority != "batch":
                    break
                victims.append(other)
                slots += other.num_slots
                spare += self._num_exclusive(other) + len(other.members)
                if slots >= 0 and spare >= 0:
                    break
            if slots < 0 or spare < 0:
                return False
        self._pool.retain(hits)
        for victim in victims:
            self._preempt(victim, now)
        self._start(group, hits, now)
        return True

    def _num_exclusive(self, group: Group) -> int:
        counts: dict[int, int] = {}
        for seq in group.members:
            for block in seq.table:
                counts[block] = counts.get(block, 0) + 1
        return sum(1 for block, count in counts.items() if self._pool.refs[block] == count)

    def _start(self, group: Group, hits: list[int], now: float) -> None:
        """Gives the group its blocks; `hits` are retained already."""
        self.waiting.remove(group)
        seq, size = group.members[0], self._pool.block_size
        if group.swapped is not None:
            self._restore(group, group.swapped)
        else:
            target = len(seq.tokens) if group.attached else (group.fork_at or 0)
            seq.table = hits + self._pool.allocate(self._pool.blocks_for(target) - len(hits))
            seq.num_computed = len(hits) * size
            seq.num_published = len(hits)
            self.prefixes.claim(group, seq, len(hits), self._match_limit(group))
            self._wants.release_before(group, seq.num_computed, now)
            self.attach_if_ready(group)
        if group.num_cached is None:
            group.num_cached = len(hits) * size
            self.counters.prefix_queries += seq.num_prompt
            self.counters.prefix_hits += group.num_cached
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now
        insort(self.running, group, key=_order)

    def _restore(self, group: Group, swapped: SwappedBlocks) -> None:
        blocks = self._pool.allocate(swapped.count)
        self._swap_in(swapped.handle, tuple(blocks))
        for seq, indices in zip(group.members, swapped.tables, strict=True):
            seq.table = [blocks[index] for index in indices]
            seq.num_published = 0
            self._pool.retain(seq.table)
        self._pool.release(blocks)  # allocate's own hold; the tables hold them now
        group.swapped = None

    def attach_if_ready(self, group: Group) -> None:
        """After a recompute: once the first member reached the fork, the others join on its blocks."""
        leader = group.members[0]
        if group.attached or leader.num_computed != group.fork_at:
            return
        group.attached = True
        for seq in group.members[1:]:
            seq.table = list(leader.table)
            seq.num_computed, seq.num_published = leader.num_computed, leader.num_published
            self._pool.retain(seq.table)
        for seq in group.members:
            seq.shares_tail = leader.num_computed % self._pool.block_size != 0

    # 2. grow

    def _grow(self, batch: Batch, now: float) -> None:
        index = 0
        while index < len(self.running):
            group = self.running[index]
            need = self._num_needed(group)
            while need > self._pool.num_available and self.running[-1] is not group:
                self._preempt(self.running[-1], now)
            if need > self._pool.num_available:
                self._preempt(group, now)
                break
            if need:
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

    def _preempt(self, group: Group, now: float) -> None:
        """Takes a running group's blocks; it waits again at its old rank and loses no token."""
        self.running.remove(group)
        if self._prefers_swap(group):
            self.counters.preempted_swap += 1
            self._swap(group)
        else:
            self.counters.preempted_recompute += 1
            for seq in group.members:
                self._pool.release(seq.forget_blocks())
            group.attached = len(group.members) == 1
        self.prefixes.disclaim(group)
        self._wants.release_all(group, now)
        group.considered = False
        group.blocked_on = group.next_key = None
        insort(self.waiting, group, key=_order)

    def _prefers_swap(self, group: Group) -> bool:
        config = self._config
        num_tokens = sum(seq.num_computed for seq in group.members)
        if config.preemption == "recompute" or num_tokens == 0 or not group.attached:
            return False
        if config.preemption == "swap":
            return True
        num_blocks = len({block for seq in group.members for block in self._computed_blocks(seq)})
        return config.swap_rule is not None and config.swap_rule(num_tokens, num_blocks)

    def _computed_blocks(self, seq: Sequence) -> list[int]:
        return seq.table[: self._pool.blocks_for(seq.num_computed)]

    def _swap(self, group: Group) -> None:
        position: dict[int, int] = {}
        tables = []
        for seq in group.members:
            tables.append([position.setdefault(block, len(position)) for block in self._computed_blocks(seq)])
        group.swapped = SwappedBlocks(self._swap_out(tuple(position)), len(position), tables)
        for seq in group.members:
            self._pool.release(seq.table)
            seq.table = []

    # 3. pick

    def _pick(self, batch: Batch, now: float) -> None:
        chunks: list[tuple[Group, Sequence, int]] = []  # up to which position
        for group in self.running:
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
        self._pool.check_integrity([seq.table for group in self.running for seq in group.members])
        for groups in (self.waiting, self.running):
            assert groups == sorted(groups, key=_order), "ranks"
        for group in self.waiting:
            assert not any(seq.table for seq in group.members) and not group.claims, (
                "a waiting group holds blocks"
            )
        for group in self.running:
            for seq in group.scheduled_members:
                assert seq.num_published * size <= seq.num_computed <= len(seq.table) * size, "intervals"
                assert seq.num_computed < len(seq.tokens), "nothing left to compute"
        num_claims = sum(len(group.claims) for group in self.running)
        assert self.prefixes.num_claims <= num_claims, "a claim without an owner"
