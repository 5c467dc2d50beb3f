"""Taking a running group's blocks when there are none left, and giving them back: recompute or swap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from llm.engine_config import EngineConfig
from llm.scheduling.blocks import BlockPool
from llm.scheduling.prefix import Prefixes
from llm.scheduling.queues import Queues, SchedulerCounters
from llm.scheduling.sequence import Group, Sequence, SwappedBlocks
from llm.scheduling.visual_wants import VisualWants


class Preemption:
    """Recompute drops a group's KV; swap keeps a host copy where the rule says that is cheaper.

    A forked group is recomputed as it was made: its first member computes up to the fork, then the others
    join on its blocks and each catches up with its own tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        prefixes: Prefixes,
        wants: VisualWants,
        queues: Queues,
        counters: SchedulerCounters,
        swap_out: Callable[[tuple[int, ...]], Any],
        swap_in: Callable[[Any, tuple[int, ...]], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._prefixes = prefixes
        self._wants = wants
        self._queues = queues
        self._counters = counters
        self._swap_out = swap_out
        self._swap_in = swap_in

    def preempt(self, group: Group, now: float) -> None:
        """Takes a running group's blocks; it waits again at its old rank and loses no token."""
        if self._prefers_swap(group):
            self._counters.preempted_swap += 1
            self._swap(group)
        else:
            self._counters.preempted_recompute += 1
            for seq in group.members:
                self._pool.release(seq.forget_blocks())
            group.attached = len(group.members) == 1
        self._prefixes.disclaim(group)
        self._wants.release_all(group, now)
        group.considered = False
        group.blocked_on = group.next_key = None
        self._queues.stop(group)

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
            seq.draft = ()

    def num_exclusive(self, group: Group, kept: list[int]) -> int:
        """Blocks that preempting `group` would free, without those in `kept`."""
        counts = Counter(block for seq in group.members for block in seq.table)
        return sum(self._pool.refs[block] == count for block, count in counts.items() if block not in kept)

    def demand(self, group: Group) -> int:
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

    def restore(self, group: Group, swapped: SwappedBlocks) -> None:
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
