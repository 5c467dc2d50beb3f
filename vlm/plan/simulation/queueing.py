"""Waiting in front of a stage: M/M/c by Erlang C, and Allen and Cunneen's correction for M/G/c."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm.cost import Bound


@dataclass(frozen=True, slots=True)
class QueueStage:
    """Servers for one kind of work."""

    servers: int
    service_s: float  # of one job on one server
    utilisation: float
    wait_s: float  # mean
    binds: Bound


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c, `offered` = arrival rate x service time < servers."""
    inverse = 1.0  # Erlang B by its recurrence, which stays finite at any size
    for n in range(1, servers + 1):
        inverse = 1.0 + inverse * n / offered
    blocking = 1.0 / inverse
    utilisation = offered / servers
    return blocking / (1.0 - utilisation + utilisation * blocking)


def mean_wait_s(servers: int, rate_per_s: float, service_s: float, spread: float = 1.0) -> float:
    """Mean wait in M/G/c; `spread` is the squared coefficient of variation of the service time."""
    offered = rate_per_s * service_s
    if offered >= servers:
        return math.inf
    if offered == 0:
        return 0.0
    waiting = erlang_c(servers, offered)
    return waiting * service_s / (servers - offered) * (1.0 + spread) / 2.0


def size_stage(
    rate_per_s: float,
    service_s: float,
    wait_limit_s: float,
    max_utilisation: float,
    spread: float = 1.0,
    binds: Bound = "compute",
) -> QueueStage:
    """The fewest servers under the utilisation limit whose mean wait is within the limit."""
    offered = rate_per_s * service_s
    servers = max(1, math.ceil(offered / max_utilisation))
    step = 1
    while mean_wait_s(servers, rate_per_s, service_s, spread) > wait_limit_s:
        servers += step
        binds = "queue"  # utilisation alone would have asked for fewer
    wait = mean_wait_s(servers, rate_per_s, service_s, spread)
    return QueueStage(servers, service_s, offered / servers, wait, binds)
