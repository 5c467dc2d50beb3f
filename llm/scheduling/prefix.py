"""Prefix caching: a block's key names everything its KV depends on, and who is computing it now."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import sha256
from typing import Protocol

from llm.request import ImageSpan
from llm.scheduling.blocks import BlockContent, BlockKey, BlockPool, ImageTouch
from llm.scheduling.sequence import Group, Sequence


def root_key(namespace: str) -> BlockKey:
    return BlockKey(sha256(b"kv-root\0" + namespace.encode()).digest())


def block_key(parent: BlockKey, token_ids: tuple[int, ...], images: tuple[ImageTouch, ...]) -> BlockKey:
    """H(parent, tokens, images touching the block with full key and offset); fields are length-prefixed."""
    digest = sha256(parent)
    digest.update(struct.pack("<I", len(token_ids)))
    digest.update(array("q", token_ids).tobytes())
    for image in images:
        name = image.key.encode()
        digest.update(struct.pack("<IIII", len(name), image.at, image.row, image.length))
        digest.update(name)
    return BlockKey(digest.digest())


def image_touches(spans: Seq[ImageSpan], start: int, end: int) -> tuple[ImageTouch, ...]:
    """The parts of `spans` (sorted, disjoint) inside positions [start, end)."""
    touches = []
    for span in spans:
        if span.start >= end:
            break
        first, last = max(span.start, start), min(span.start + span.length, end)
        if first < last:
            touches.append(
                ImageTouch(span.key, first - start, span.offset + first - span.start, last - first)
            )
    return tuple(touches)


class Prefixes(Protocol):
    """What the scheduler asks of prefix caching; `NoPrefixCache` is "off"."""

    def match(self, group: Group, seq: Sequence, limit: int) -> list[int]: ...
    def next_key(self, seq: Sequence, num_hits: int, limit: int) -> BlockKey | None: ...
    def publish(self, group: Group, seq: Sequence) -> None: ...
    def owner(self, key: BlockKey) -> Group | None: ...
    def claim(self, group: Group, seq: Sequence, num_hits: int, limit: int) -> None: ...
    def disclaim(self, group: Group) -> None: ...
    def is_published(self, key: BlockKey) -> bool: ...

    @property
    def num_claims(self) -> int: ...


class PrefixCache:
    """Finds published blocks, publishes written ones, and lets a second request wait for the first's.

    A claim says "this group is computing this block"; it ends when the block is published or when the
    group stops for any reason, so that a waiter can always take over.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._claims: dict[BlockKey, Group] = {}
        self.on_publish: Callable[[Group, int, BlockContent], None] | None = (
            None  # (.., block of the prompt, ..)
        )

    def match(self, group: Group, seq: Sequence, limit: int) -> list[int]:
        """Published blocks holding `seq`'s first tokens, at most `limit`. Holds and evicts nothing."""
        self._hash_blocks(group, seq, limit)
        blocks = []
        for content in seq.contents[:limit]:
            block = self._pool.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def next_key(self, seq: Sequence, num_hits: int, limit: int) -> BlockKey | None:
        """Key of the first block that was not hit, if it can be hit at all."""
        return seq.contents[num_hits].key if num_hits < min(limit, len(seq.contents)) else None

    def publish(self, group: Group, seq: Sequence) -> None:
        """Publishes the full blocks in [num_published, num_computed): their KV has been written."""
        num_full = seq.num_computed // self._pool.block_size
        if num_full <= seq.num_published:
            return
        self._hash_blocks(group, seq, num_full)
        for index in range(seq.num_published, num_full):
            content = seq.contents[index]
            self._pool.publish(seq.table[index], content)
            if self.on_publish is not None:
                self.on_publish(group, index, content)
            if self._claims.get(content.key) is group:
                del self._claims[content.key]
        seq.num_published = num_full

    def owner(self, key: BlockKey) -> Group | None:
        return self._claims.get(key)

    def claim(self, group: Group, seq: Sequence, num_hits: int, limit: int) -> None:
        """`group` will compute its blocks [num_hits, limit)."""
        for content in seq.contents[num_hits:limit]:
            if self._claims.setdefault(content.key, group) is group:
                group.claims.append(content.key)

    def disclaim(self, group: Group) -> None:
        for key in group.claims:
            if self._claims.get(key) is group:
                del self._claims[key]
        group.claims.clear()

    def is_published(self, key: BlockKey) -> bool:
        return self._pool.has_key(key)

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def _hash_blocks(self, group: Group, seq: Sequence, count: int) -> None:
        size, contents = self._pool.block_size, seq.contents
        count = min(count, len(seq.tokens) // size)
        if len(contents) >= count:
            return
        parent = contents[-1].key if contents else root_key(group.request.namespace)
        spans = group.spans
        for index in range(len(contents), count):
            start = index * size
            token_ids = tuple(seq.tokens[start : start + size])
            images = image_touches(spans, start, start + size) if start < group.spans_end else ()
            parent = block_key(parent, token_ids, images)
            contents.append(BlockContent(parent, token_ids, images))


class NoPrefixCache:
    """Prefix caching switched off: nothing is found, published or waited for."""

    def match(self, group: Group, seq: Sequence, limit: int) -> list[int]:
        return []

    def next_key(self, seq: Sequence, num_hits: int, limit: int) -> BlockKey | None:
        return None

    def publish(self, group: Group, seq: Sequence) -> None:
        return None

    def owner(self, key: BlockKey) -> Group | None:
        return None

    def claim(self, group: Group, seq: Sequence, num_hits: int, limit: int) -> None:
        return None

    def disclaim(self, group: Group) -> None:
        return None

    def is_published(self, key: BlockKey) -> bool:
        return False

    @property
    def num_claims(self) -> int:
        return 0
