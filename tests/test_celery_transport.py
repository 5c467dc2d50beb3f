"""A worker's channel whose connection was given up fails in a way that the worker survives."""

from __future__ import annotations

import pytest
from conftest import RedisServer

from workers.celery_app import make_app

pytestmark = pytest.mark.redis


def test_acknowledging_over_a_closed_connection_is_a_connection_error(redis_server: RedisServer) -> None:
    with make_app(redis_server.url) as app:
        connection = app.connection_for_read()
        channel = connection.channel()
        connection.close()
        with pytest.raises(connection.connection_errors):
            channel.basic_ack("tag")
