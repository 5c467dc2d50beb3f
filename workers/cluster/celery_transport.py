"""Kombu's Redis transport, whose lost channels say so in a way that Celery's workers survive.

Messages that it gives back to a replica's queue end with it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from redis.exceptions import OutOfMemoryError

from workers.cluster.celery_app import PASSING_S
from workers.cluster.names import GENERATE_PREFIX
from workers.cluster.redis_clock import RedisClock

log = logging.getLogger(__name__)

# KEYS: the index of deliveries by time. ARGV: one that is in it
_DATE = "return redis.call('ZADD', KEYS[1], 'XX', redis.call('TIME')[1], ARGV[1])"


class LastingQoS(kombu_redis.QoS):
    """Knows what was delivered and acknowledged though Redis, at its memory limit, takes no note of it.

    A worker would exit over it. What is not noted may come again, or be lost with the worker; whoever waits
    for the work sends it again, and doing it twice does no harm.
    """

    def append(self, message: Any, delivery_tag: str) -> None:
        try:
            super().append(message, delivery_tag)
            with self.channel.conn_or_acquire() as client:
                client.eval(_DATE, 1, self.unacked_index_key, delivery_tag)
        except OutOfMemoryError:
            log.warning("Redis is at its memory limit: a delivery was not noted")
            virtual.QoS.append(self, message, delivery_tag)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """What was not acknowledged for `visibility_timeout` on Redis's clock, whatever this host's says."""
        with self.channel.conn_or_acquire() as client:
            ahead_s = time.time() - RedisClock(client).now()
        self.visibility_timeout = self.channel.visibility_timeout + ahead_s
        super().restore_visible(*args, **kwargs)

    def ack(self, delivery_tag: str) -> None:
        try:
            super().ack(delivery_tag)
        except OutOfMemoryError:
            log.warning("Redis is at its memory limit: an acknowledgement was not noted")
            virtual.QoS.ack(self, delivery_tag)


class LastingChannel(kombu_redis.Channel):
    """Fails with a connection error once its connection was given up.

    Kombu 5.7 raises AttributeError then. A worker meets it whenever Redis goes away while messages are
    unacknowledged, as it wants to give them back, and again as their tasks end and acknowledge them; it takes
    any other error than a connection's for unrecoverable and exits.
    """

    QoS = LastingQoS

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            raise redis.ConnectionError("the channel's connection was lost")
        parameters: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        return parameters

    def _do_restore_message(
        self, payload: Any, exchange: str, routing_key: str, pipe: Any, leftmost: bool = False
    ) -> None:
        """What a dead replica did not acknowledge goes back into its queue, which no process reads."""
        super()._do_restore_message(payload, exchange, routing_key, pipe, leftmost)
        for queue in self._lookup(exchange, routing_key):
            if queue.startswith(GENERATE_PREFIX):
                for priority in self.priority_steps:
                    pipe.expire(self._q_for_pri(queue, priority), round(PASSING_S))


class LastingTransport(kombu_redis.Transport):
    Channel = LastingChannel
