"""A worker's channel whose connection was given up fails in a way that the worker survives."""

from __future__ import annotations

import pytest
from conftest import RedisServer

from workers.cluster.celery_app import make_app
from workers.cluster.redis_client import connect

pytestmark = pytest.mark.redis


def test_acknowledging_over_a_closed_connection_is_a_connection_error(redis_server: RedisServer) -> None:
    with make_app(redis_server.url) as app:
        connection = app.connection_for_read()
        channel = connection.channel()
        connection.close()
        with pytest.raises(connection.connection_errors):
            channel.basic_ack("tag")


def test_redis_at_its_memory_limit_neither_stops_a_delivery_nor_its_acknowledgement(
    redis_server: RedisServer,
) -> None:
    client = connect(redis_server.url)
    taken = []
    with make_app(redis_server.url) as app:
        for number in range(2):
            app.send_task("any", args=[number], queue="some")
        with app.connection_for_read() as connection:
            channel = connection.channel()
            queue = app.amqp.queues["some"]
            with channel.Consumer(
                [queue], accept=["json"], callbacks=[lambda _, message: taken.append(message)]
            ):
                connection.drain_events(timeout=5)
                client.config_set("maxmemory", 1)
                connection.drain_events(timeout=5)
                for message in taken:
                    message.ack()
                assert len(taken) == 2 and all(message.acknowledged for message in taken)
                client.config_set("maxmemory", 0)
                app.send_task("any", args=[2], queue="some")
                connection.drain_events(timeout=5)
                taken[-1].ack()
    assert len(taken) == 3
    client.close()
