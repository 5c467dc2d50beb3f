"""How busy each replica is, as a node sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from workers.cluster.members import Watch
from workers.cluster.node.remote_calls import RemoteCall


class ReplicaLoads:
    """This node's requests as of now, other nodes' as of each replica's last heartbeat."""

    def __init__(self, replicas: Watch, calls: Mapping[str, RemoteCall], revision: str | None) -> None:
        """calls: this node's. revision: of the encoder that replicas must have; None takes any."""
        self._replicas = replicas
        self._calls = calls
        self._revision = revision
        self._others: dict[str, int] = {}
        self._beats: dict[str, int] = {}  # the heartbeats that `_others` refers to

    def candidates(self) -> dict[str, float]:
        """Requests at each replica that takes some."""
        ours = self._ours()
        loads = {}
        for name, about in self._replicas.alive.items():
            if not about.get("draining") and self._revision in (None, about.get("encoder_revision")):
                loads[name] = float(ours[name] + self._others.get(name, 0))
        return loads

    def count_others(self) -> None:
        """After a look at the replicas."""
        ours = self._ours()
        for name, about in self._replicas.alive.items():
            beat = about.get("beat", 0)
            if self._beats.get(name) != beat:
                self._beats[name] = beat
                self._others[name] = max(0, about.get("active", 0) - ours[name])

    def stats(self) -> dict[str, Any]:
        """Sums of the replicas' own numbers, by section and name."""
        total: dict[str, Any] = {}
        for about in self._replicas.alive.values():
            for section, values in about.get("stats", {}).items():
                sums = total.setdefault(section, {})
                for name, value in values.items():
                    if isinstance(value, int | float):
                        sums[name] = sums.get(name, 0) + value
        return total

    def _ours(self) -> Counter[str]:
        return Counter(call.replica for call in self._calls.values())
