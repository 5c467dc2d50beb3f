"""Who waits and who runs, both in `Group.order`."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from llm.scheduling.sequence import Group


def order_of(group: Group) -> tuple[float, int]:
    return group.order


@dataclass(slots=True)
class Queues:
    """A live group is in exactly one of the two lists; running ones hold blocks."""

    waiting: list[Group] = field(default_factory=list)
    running: list[Group] = field(default_factory=list)

    def enqueue(self, group: Group) -> None:
        insort(self.waiting, group, key=order_of)

    def start(self, group: Group) -> None:
        self.waiting.remove(group)
        insort(self.running, group, key=order_of)

    def stop(self, group: Group) -> None:
        self.running.remove(group)
        insort(self.waiting, group, key=order_of)

    def remove(self, group: Group) -> None:
        (self.running if group in self.running else self.waiting).remove(group)

    def lend_order(self, owner: Group, waiter: Group) -> None:
        """A group that computes blocks for an earlier request takes its place in line, and its class."""
        if waiter.order < owner.order:
            owner.order = waiter.order
            if waiter.priority == "interactive":
                owner.priority = "interactive"
            self.running.sort(key=order_of)

    def num_slots_taken(self) -> int:
        return sum(group.num_slots for group in self.running)


@dataclass(slots=True)
class SchedulerCounters:
    preempted_recompute: int = 0
    preempted_swap: int = 0
    prefix_queries: int = 0  # prompt tokens of admitted requests
    prefix_hits: int = 0  # of these, found in the cache
