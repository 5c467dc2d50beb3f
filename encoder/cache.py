"""Visual tokens by content key, or why they can't be had. Bounded in bytes; computes nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Failure = tuple[str, str]  # (code, message), the message safe to show a client


@dataclass(slots=True)
class CacheCounters:
    """Since the cache was made. One query is one image of one request, however often it is then read."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


class VisualCache:
    """Least recently used entries go first once `max_bytes` is exceeded; a held entry never goes.

    A key may be held before its entry arrives. Unheld entries are kept only within the cap; an entry larger
    than the cap therefore serves those who hold it and leaves with the last of them. Values need `nbytes`.
    A failure is known as long as a request holds its key: those that come later did not wait for it.
    Not thread-safe: one owner.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError("max_bytes must not be negative")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.counters = CacheCounters()
        self._entries: OrderedDict[str, Any] = OrderedDict()  # least recently used first
        self._holds: dict[str, int] = {}
        self._doomed: set[str] = set()  # discarded while held: they leave with their last holder
        self._failures: dict[str, Failure] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def query(self, key: str) -> bool:
        """Whether the entry is there, counted as one query; asked once when a request arrives."""
        self.counters.queries += 1
        found = key in self._entries
        self.counters.hits += found
        return found

    def get(self, key: str) -> Any | None:
        """The entry, marked as just used, or None. Not counted."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: str, value: Any) -> bool:
        """Stores an entry and evicts down to the cap; returns whether this entry was kept.

        A key names its content, so an entry that is already there stays as it is.
        """
        if key not in self._entries:
            self._failures.pop(key, None)
            self._entries[key] = value
            self.num_bytes += value.nbytes
            if not self.holds(key) and value.nbytes > self.max_bytes:
                self._remove(key)  # it could only push everything else out
        self._trim()
        return key in self._entries

    def holds(self, key: str) -> int:
        return self._holds.get(key, 0)

    @property
    def num_holds(self) -> int:
        return sum(self._holds.values())

    def hold(self, key: str) -> None:
        """A live request may read this key: keep its entry, now or once it arrives. Counted."""
        self._holds[key] = self._holds.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Takes one hold back. Raises ValueError if there is none."""
        count = self._holds.get(key, 0)
        if count == 0:
            raise ValueError("release without a hold")
        if count > 1:
            self._holds[key] = count - 1
            return
        del self._holds[key]
        self._failures.pop(key, None)
        if key in self._doomed:
            self._doomed.remove(key)
            if key in self._entries:
                self._remove(key)
        elif key in self._entries and self._entries[key].nbytes > self.max_bytes:
            self._remove(key)
        self._trim()

    def fail(self, key: str, failure: Failure) -> None:
        """The entry can't be had; reported to those who hold the key now."""
        if self.holds(key) and key not in self._entries:
            self._failures[key] = failure

    def failure(self, key: str) -> Failure | None:
        return self._failures.get(key)

    def forget_failure(self, key: str) -> None:
        self._failures.pop(key, None)

    def drop(self, key: str) -> None:
        """Forgets an entry that is not what its key says, even if it is held."""
        if key in self._entries:
            self._doomed.discard(key)
            self._remove(key)

    def discard(self, key: str) -> None:
        """Forgets one entry: at once, or when its last holder lets go."""
        if self.holds(key):
            self._doomed.add(key)
        elif key in self._entries:
            self._remove(key)

    def clear(self) -> int:
        """Forgets every entry, held ones when their last holder lets go; returns the bytes freed at once."""
        before = self.num_bytes
        for key in list(self._entries):
            self.discard(key)
        return before - self.num_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the books don't balance."""
        assert self.num_bytes == sum(value.nbytes for value in self._entries.values())
        assert all(count > 0 for count in self._holds.values())
        assert self._doomed <= self._holds.keys()
        assert self._failures.keys() <= self._holds.keys() - self._entries.keys()
        free = [key for key in self._entries if not self.holds(key)]
        assert not free or self.num_bytes <= self.max_bytes

    def _trim(self) -> None:
        """Evicts unheld entries, oldest first, until the cap holds or only held ones are left."""
        if self.num_bytes <= self.max_bytes:
            return
        for key in [key for key in self._entries if not self.holds(key)]:
            self._remove(key)
            self.counters.evictions += 1
            if self.num_bytes <= self.max_bytes:
                return

    def _remove(self, key: str) -> None:
        self.num_bytes -= self._entries.pop(key).nbytes
