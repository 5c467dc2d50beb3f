"""The KV pool's ids: who holds which block, which hold cached content, and what is evicted first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: sha256 over the parent's key, the block's tokens and the images that touch it."""


class ImageTouch(NamedTuple):
    """Block positions [at, at + length) show rows [row, row + length) of `key`'s visual tokens."""

    key: str
    at: int
    row: int
    length: int


class BlockContent(NamedTuple):
    """What a full block's KV was computed from; compared on a hit, so no collision can serve another's KV."""

    key: BlockKey
    token_ids: tuple[int, ...]
    images: tuple[ImageTouch, ...]


class BlockPool:
    """Reference counts over `num_blocks` blocks; every block is free, held, or cached.

    free: no holder, no content. held: at least one holder. cached: no holder, published content that a
    later request may revive; evicted oldest first when no free block is left.
    Reference: vLLM's block pool (one free queue, tail-first release), reduced to plain ids.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._content: list[BlockContent | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each and no content. The caller has checked `num_available`."""
        if count > self.num_available:
            raise RuntimeError("block pool exhausted: the caller did not check num_available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more holder for each; a cached block becomes held again."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._cached[block]
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Tail first, so that a chain of blocks is evicted from its end."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self._content[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, content: BlockContent) -> None:
        """Makes a held block, whose KV has been written, findable. The first block of a key stays."""
        if self._content[block] is None and content.key not in self._by_key:
            self._content[block] = content
            self._by_key[content.key] = block

    def find(self, content: BlockContent) -> int | None:
        block = self._by_key.get(content.key)
        if block is None:
            return None
        known = self._content[block]
        if known is None or known.token_ids != content.token_ids or known.images != content.images:
            return None
        return block

    def has_key(self, key: BlockKey) -> bool:
        return key in self._by_key

    def clear_cached(self) -> int:
        """Forgets all published content; held blocks stay with their holders. Returns blocks freed."""
        count = len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._content = [None] * self.num_blocks
        return count

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content = self._content[block]
        assert content is not None
        del self._by_key[content.key]
        self._content[block] = None
        self.num_evictions += 1
        return block

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free + held + cached == total and holders equal `tables`."""
        held = Counter(block for table in tables for block in table)
        assert all(self.refs[block] == held.get(block, 0) for block in range(self.num_blocks)), "refs"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not (free | cached) & held.keys(), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "free + held + cached != total"
        keyed = {block for block, content in enumerate(self._content) if content is not None}
        assert keyed == set(self._by_key.values()) and len(keyed) == len(self._by_key), "key index"
        assert cached <= keyed and not free & keyed, "content of a free block, or a cached one without"
