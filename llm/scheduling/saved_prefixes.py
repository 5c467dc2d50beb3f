"""KV blocks of images that outlive the pool's memory and the process: looked for before a prompt is computed,
kept behind the steps that computed them.

What is found comes into the pool as cached blocks, so that admission sees a prefix hit like any other.
Reference: vLLM's KV connectors (external prefix caches), reduced to one store and whole blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from llm.scheduling.blocks import BlockContent, BlockKey, BlockPool
from llm.scheduling.prefix import PrefixCache
from llm.scheduling.sequence import Group

log = logging.getLogger(__name__)

SAVED_AT_ONCE = 8  # blocks copied out of the pool behind a step

ReadRule = Callable[[int, int], bool]
"""(tokens to compute, blocks to read) -> whether reading is sooner."""


class BlockStore(Protocol):
    """Blocks by key, kept by other threads. No method waits for a disk."""

    def has(self, key: BlockKey) -> bool:
        """Perhaps: a block may be damaged or gone by the time that it is read."""
        ...

    def read(self, keys: list[BlockKey]) -> Future[list[bytes]]:
        """Those that are whole, up to the first that isn't."""
        ...

    def write(self, key: BlockKey, data: bytes) -> bool:
        """False if too much waits to be written: the block is not kept."""
        ...


class BlockBytes(Protocol):
    """A backend's blocks as bytes; part of `llm.backend.base.Backend`."""

    def save_blocks(self, blocks: tuple[int, ...]) -> list[bytes]: ...

    def load_blocks(self, saved: list[bytes], blocks: tuple[int, ...]) -> None: ...


@dataclass(slots=True)
class SavedCounters:
    read: int = 0  # blocks
    written: int = 0  # blocks handed to the store
    dropped: int = 0  # blocks that the store had no room to take


class SavedPrefixes:
    """Used by the engine's owner alone."""

    def __init__(
        self,
        store: BlockStore,
        pool: BlockPool,
        prefixes: PrefixCache,
        backend: BlockBytes,
        rule: ReadRule,
    ) -> None:
        self._store = store
        self._pool = pool
        self._prefixes = prefixes
        self._backend = backend
        self._rule = rule
        self._to_save: deque[BlockContent] = deque()
        self._reads: dict[BlockKey, Future[list[bytes]]] = {}  # by their first block
        self._waiting: dict[Group, Future[list[bytes]]] = {}
        self.counters = SavedCounters()
        prefixes.on_publish = self._note

    def is_reading(self, group: Group, limit: int) -> bool:
        """Whether the group waits for blocks from the store, which are asked for at its first call; those
        that have come are in the pool when this returns.

        limit: most blocks that the group may find.
        """
        if group.saved_from is None:
            group.saved_from = self._look(group, limit)
        future = self._waiting.get(group)
        if future is None:
            return False
        if not future.done():
            return True
        self.forget(group)
        self._take(group, group.saved_from, future)
        return False

    def forget(self, group: Group) -> None:
        """It waits no more."""
        self._waiting.pop(group, None)
        for key in [key for key, future in self._reads.items() if future.done()]:
            del self._reads[key]

    @property
    def has_pending(self) -> bool:
        """Blocks wait to be copied out."""
        return bool(self._to_save)

    @property
    def is_waiting(self) -> bool:
        """Some group waits for a read, or has not taken up what was read."""
        return bool(self._waiting)

    def wait(self, timeout_s: float) -> None:
        """For a read under way."""
        wait(self._waiting.values(), timeout_s, return_when=FIRST_COMPLETED)

    def _look(self, group: Group, limit: int) -> BlockKey:
        """The first block that the pool lacks; its read, if there is one, is under way."""
        seq, size = group.members[0], self._pool.block_size
        end = min(limit, -(-group.spans_end // size))  # blocks of text alone are cheaper to compute
        hits = self._prefixes.match(group, seq, end)
        keys = [content.key for content in seq.contents[len(hits) : end]]
        count = 0
        while count < len(keys) and self._store.has(keys[count]):
            count += 1
        if not count or not self._rule(count * size, count):
            return BlockKey(b"")
        first = keys[0]
        if first not in self._reads:
            self._reads[first] = self._store.read(keys[:count])
        self._waiting[group] = self._reads[first]
        return first

    def _take(self, group: Group, first: BlockKey, future: Future[list[bytes]]) -> None:
        """Into the pool, as many as it has room for beside what the group finds there already."""
        try:
            saved = future.result()
        except Exception:
            log.exception("saved blocks could not be read")
            return
        seq = group.members[0]
        hits = self._prefixes.match(group, seq, len(seq.contents))
        start = next((i for i, content in enumerate(seq.contents) if content.key == first), len(seq.contents))
        contents = seq.contents[len(hits) : start + len(saved)]
        saved = saved[len(hits) - start :] if len(hits) >= start else []
        self._pool.retain(hits)
        count = min(len(contents), len(saved), self._pool.num_available)
        blocks = self._pool.allocate(count)
        try:
            self._backend.load_blocks(saved[:count], tuple(blocks))
            for block, content in zip(blocks, contents, strict=False):
                self._pool.publish(block, content)
            self.counters.read += count
        except ValueError:
            log.warning("saved blocks are not this model's")
        finally:
            self._pool.release(hits + blocks)

    def _note(self, group: Group, index: int, content: BlockContent) -> None:
        """A block was published; those up to the end of the prompt's last image are worth keeping."""
        if index * self._pool.block_size < group.spans_end:
            self._to_save.append(content)

    def save_some(self) -> None:
        """Copies a few of the blocks that wait, if the pool still has them."""
        contents: list[BlockContent] = []
        blocks: list[int] = []
        while self._to_save and len(blocks) < SAVED_AT_ONCE:
            content = self._to_save.popleft()
            block = self._pool.find(content)
            if block is not None and not self._store.has(content.key):
                contents.append(content)
                blocks.append(block)
        for content, data in zip(contents, self._backend.save_blocks(tuple(blocks)), strict=True):
            if self._store.write(content.key, data):
                self.counters.written += 1
            else:
                self.counters.dropped += 1
