"""From waiting to running: prefix hits, single flight, visual tokens, slots and blocks."""

from __future__ import annotations

from llm.engine_config import EngineConfig
from llm.scheduling.blocks import BlockPool
from llm.scheduling.preempt import Preemption
from llm.scheduling.prefix import Prefixes
from llm.scheduling.queues import Queues, SchedulerCounters
from llm.scheduling.saved_prefixes import SavedPrefixes
from llm.scheduling.sequence import Group
from llm.scheduling.visual_wants import VisualFailure, VisualWants


class SequenceAdmission:
    """Admits in `Group.order`. A group that waits for images, for its grammar, or for a prefix
    that another group is computing, is passed over; one that lacks slots or blocks is not overtaken."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        prefixes: Prefixes,
        wants: VisualWants,
        queues: Queues,
        counters: SchedulerCounters,
        preemption: Preemption,
        saved: SavedPrefixes | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._prefixes = prefixes
        self._wants = wants
        self._queues = queues
        self._counters = counters
        self._preemption = preemption
        self._saved = saved

    def admit(self, now: float) -> list[tuple[Group, str, str]]:
        """Starts what can start; returns (group, code, message) of those whose images failed."""
        failures: list[tuple[Group, str, str]] = []
        waiting, running = self._queues.waiting, self._queues.running
        if not waiting or (self._config.batching == "static" and running):
            return failures
        has_room = True
        num_wanting = num_ahead = 0
        for group in list(waiting):
            if not has_room and num_ahead >= self._config.visual_lookahead:
                break
            if group.grammar is not None:
                continue
            try:
                if has_room and self._is_stuck(group, num_wanting):
                    num_wanting += bool(group.held)
                    continue
                has_room = has_room and self._may_get_slots(group)
                if not has_room:
                    num_ahead += 1
                    if num_wanting < self._config.visual_lookahead:
                        self._look_ahead(group, now)
                    num_wanting += bool(group.held)
                    continue
                if self._saved is not None and self._saved.is_reading(group, self._match_limit(group)):
                    continue
                hits = self._find_hits(group)
                if hits is None:
                    continue
                if self._has_visuals(group, len(hits), num_wanting, now):
                    has_room = self._try_start(group, hits, now)
                else:
                    num_wanting += bool(group.held)
            except VisualFailure as failure:
                failures.append((group, failure.code, failure.message))
        return failures

    def _may_get_slots(self, group: Group) -> bool:
        """Whether slots are free, or held by batch work that an interactive request may preempt."""
        if self._queues.num_slots_taken() + group.num_slots <= self._config.max_running:
            return True
        running = self._queues.running
        return group.priority == "interactive" and any(g.priority == "batch" for g in running)

    def _is_stuck(self, group: Group, num_wanting: int) -> bool:
        """Constant-time check of what the group waited for last time."""
        if group.blocked_on is not None:
            owner = self._prefixes.owner(group.blocked_on)
            if owner is not None:
                self._queues.lend_order(owner, group)
                return True
            group.blocked_on = None
        if group.missing_visual is None or self._wants.is_settled(group.missing_visual):
            return False
        if not group.considered and num_wanting < self._config.visual_lookahead:
            return False
        if group.considered and group.missing_visual not in group.asked:
            return False  # it came, and was dropped: to be asked for again
        return group.next_key is None or not self._prefixes.is_published(group.next_key)

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

    def _find_hits(self, group: Group) -> list[int] | None:
        """Its blocks in the prefix cache, or None while another group computes the next one."""
        seq, limit = group.members[0], self._match_limit(group)
        hits = self._prefixes.match(group, seq, limit) if limit else []
        group.next_key = self._prefixes.next_key(seq, len(hits), limit)
        if group.next_key is not None:
            owner = self._prefixes.owner(group.next_key)
            if owner is not None and owner is not group:
                group.blocked_on = group.next_key
                self._queues.lend_order(owner, group)
                return None
        return hits

    def _has_visuals(self, group: Group, num_hits: int, num_wanting: int, now: float) -> bool:
        """Whether it can start: all visual tokens are there, or a block's worth before the first missing."""
        start = group.members[0].num_computed if group.swapped else num_hits * self._pool.block_size
        if start >= group.spans_end or group.swapped is not None:
            return True
        if not group.considered and num_wanting >= self._config.visual_lookahead:
            group.missing_visual = self._wants.first_missing(group, start)
            if group.missing_visual is not None:
                return False
        group.considered = True
        missing_at = self._wants.ensure(group, start, now)
        return missing_at is None or missing_at - start >= self._pool.block_size

    def _look_ahead(self, group: Group, now: float) -> None:
        """No room for the group yet: ask for its images all the same, once."""
        if not group.spans or group.swapped is not None or group.considered:
            return
        hits = self._find_hits(group)
        if hits is not None:
            group.considered = True
            self._wants.ensure(group, len(hits) * self._pool.block_size, now)

    def _try_start(self, group: Group, hits: list[int], now: float) -> bool:
        """Admits if slots and blocks allow, preempting later batch work for an interactive request."""
        idle_hits = sum(1 for block in hits if self._pool.refs[block] == 0)
        slots = self._config.max_running - self._queues.num_slots_taken() - group.num_slots
        # Headroom: each running sequence may need one block more in the next step.
        headroom = sum(len(other.members) for other in self._queues.running)
        spare = self._pool.num_available - idle_hits - (self._preemption.demand(group) - len(hits)) - headroom
        victims: list[Group] = []
        if slots < 0 or spare < 0:
            if group.priority == "interactive":
                victims = self._victims(group, hits, slots, spare)
            if not victims:
                return False
        self._pool.retain(hits)
        for victim in victims:
            self._preemption.preempt(victim, now)
        self._start(group, hits, now)
        return True

    def _victims(self, group: Group, hits: list[int], slots: int, spare: int) -> list[Group]:
        """Batch groups, last first, that make up for the lack of slots and blocks; empty if they can't."""
        victims: list[Group] = []
        for other in reversed(self._queues.running):
            if other.order < group.order:
                break
            if other.priority == "batch":
                victims.append(other)
                slots += other.num_slots
                spare += self._preemption.num_exclusive(other, hits) + len(other.members)
                if slots >= 0 and spare >= 0:
                    return victims
        return []

    def _start(self, group: Group, hits: list[int], now: float) -> None:
        """Gives the group its blocks; `hits` are retained already."""
        seq, size = group.members[0], self._pool.block_size
        if group.swapped is not None:
            self._preemption.restore(group, group.swapped)
        else:
            target = len(seq.tokens) if group.attached else (group.fork_at or 0)
            seq.table = hits + self._pool.allocate(self._pool.blocks_for(target) - len(hits))
            seq.num_computed = len(hits) * size
            seq.num_published = len(hits)
            self._prefixes.claim(group, seq, len(hits), self._match_limit(group))
            self._wants.release_before(group, seq.num_computed, now)
            self._preemption.attach_if_ready(group)
        if group.num_cached is None:
            group.num_cached = len(hits) * size
            self._counters.prefix_queries += seq.num_prompt
            self._counters.prefix_hits += group.num_cached
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now
        self._queues.start(group)
