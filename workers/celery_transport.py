"""Kombu's Redis transport, whose lost channels say so in a way that Celery's workers survive."""

from __future__ import annotations

from typing import Any

import redis
from kombu.transport import redis as kombu_redis


class LastingChannel(kombu_redis.Channel):
    """Fails with a connection error once its connection was given up.

    Kombu 5.7 raises AttributeError then. A worker meets it whenever Redis goes away while messages are
    unacknowledged, as it wants to give them back, and again as their tasks end and acknowledge them; it takes
    any other error than a connection's for unrecoverable and exits.
    """

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            raise redis.ConnectionError("the channel's connection was lost")
        parameters: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return parameters


class LastingTransport(kombu_redis.Transport):
    Channel = LastingChannel
