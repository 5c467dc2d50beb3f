"""What whoever started a worker reads."""

from __future__ import annotations

import logging
import threading

import pytest
import redis
from celery.signals import worker_ready

from workers.cluster.celery_app import make_app
from workers.cluster.members import HeartbeatThread, Registry


class Consumer:
    hostname = "generate-a@host"


def test_a_worker_says_when_it_takes_work(capfd: pytest.CaptureFixture[str]) -> None:
    worker_ready.send(sender=Consumer())
    assert capfd.readouterr().err == "generate-a@host is ready\n"


def test_messages_about_the_broker_name_no_module_and_no_password() -> None:
    with make_app("redis://:secret@127.0.0.1:1/0") as app:
        shown = app.connection_for_read().as_uri()
    assert "redis" in shown and "workers" not in shown and "secret" not in shown


def test_a_redis_that_is_away_is_told_once_and_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cluster.members.BEAT_S", 0.001)
    registry, beats = Registry(redis.Redis(port=1, retry=None), "replica"), threading.Semaphore(0)

    def about() -> dict[str, str]:
        beats.release()
        return {}

    thread = HeartbeatThread(registry, "a", about)
    with caplog.at_level(logging.WARNING, "workers.cluster.members"):
        thread.start()
        assert all(beats.acquire(timeout=10) for _ in range(4))
        thread.close()
    failed = [record for record in caplog.records if "heartbeat failed" in record.getMessage()]
    assert len(failed) == 1 and failed[0].exc_info is None and "refused" in failed[0].getMessage()
