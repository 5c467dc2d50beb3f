"""Which replica answers a request: the one that most likely holds its prefix, unless it is too busy.

Rendezvous hashing: every replica gets a score per key, the highest wins. All nodes agree without talking, and
a replica that comes or goes moves only its own share of the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from llm.request import Prompt

TEXT_HEAD_TOKENS = 64  # text-only prompts that begin alike go together
SPILL_THRESHOLD = 8.0  # requests: more hits than with 2 or 4, and no later first tokens


def routing_key(prompt: Prompt, namespace: str = "") -> str:
    """What requests that can share a prefix have in common: the first image, or else the first tokens."""
    if prompt.spans:
        return f"image:{namespace}:{prompt.spans[0].key}"
    head = ",".join(str(token) for token in prompt.token_ids[:TEXT_HEAD_TOKENS])
    return f"text:{namespace}:{head}"


def score(key: str, replica: str) -> int:
    """64 bits that look random and are the same everywhere."""
    digest = hashlib.blake2b(digest_size=8)
    for field in (replica.encode(), key.encode()):
        digest.update(len(field).to_bytes(8, "big") + field)
    return int.from_bytes(digest.digest(), "big")


def ranked(key: str, replicas: Sequence[str]) -> list[str]:
    """Favourite first."""
    return sorted(replicas, key=lambda name: (score(key, name), name), reverse=True)


def choose(key: str, loads: Mapping[str, float], threshold: float = SPILL_THRESHOLD) -> str:
    """The favourite, or the least loaded replica if the favourite has over `threshold` requests more.

    loads: requests queued and running, by live replica. Equally loaded ones are taken in the key's own order,
    so that spilled requests of one key stay together. Raises ValueError when there is no replica.
    """
    if not loads:
        raise ValueError("no replica is alive")
    order = ranked(key, list(loads))
    least = min(order, key=lambda name: loads[name])
    return least if loads[order[0]] > loads[least] + threshold else order[0]
