"""What the kernel grants a process that works for strangers."""

from __future__ import annotations

import math
import os
import resource

OUT_OF_MEMORY_EXIT = 3  # exit status of a process whose image asked for more memory than it may have


def limit_memory(*, total_bytes: int = 0, spare_bytes: int = 0) -> None:
    """This process may have `total_bytes` of address space, or grow by `spare_bytes`; it writes no core
    file. Nothing in it can raise that again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _under(total_bytes or _address_space_bytes() + spare_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forbid_writing() -> None:
    """This process may write to no file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def limit_cpu(seconds: int) -> None:
    """From now, this process may use so much processor time; then the kernel ends it, with SIGXCPU."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_under(limit, hard), hard))


def unlimit_cpu() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def allow_descriptors() -> None:
    """This process may hold as many files, connections and shared memories open as the system lets it: each
    image that waits for its encoder is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _under(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 29
