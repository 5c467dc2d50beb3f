"""What the kernel grants a process that decodes strangers' images."""

from __future__ import annotations

import math
import os
import resource

OUT_OF_MEMORY_EXIT = 3  # exit status of a process whose image asked for more memory than it may have


def limit_memory(spare_bytes: int) -> None:
    """Lets this process grow by `spare_bytes` of address space, and write no core file."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_under(_address_space_bytes() + spare_bytes, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def limit_cpu(seconds: int) -> None:
    """From now, this process may use so much processor time; then the kernel ends it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_under(limit, hard), hard))


def unlimit_cpu() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _under(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 29
