"""One way to talk to Redis: short timeouts, and a stated patience while it is away."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from workers.cluster.names import MEMORY_STORE

SOCKET_TIMEOUT_S = 2.0
_MAX_PAUSE_S = 0.5
_READ_BYTES = 1 << 17
log = logging.getLogger(__name__)

SCHEMES = ("redis://", "rediss://", "unix://")
AWAY = (redis.RedisError, OSError)
"""What a call raises while Redis is away."""
AWAY_PAUSE_S = 0.3  # at most, of a loop that waits for it to come back


def connect(url: str, patience_s: float = 0.0) -> redis.Redis:
    """A client that has not connected yet; safe to hand to a forked process.

    patience_s: roughly how long a call tries again before it raises. Raises ValueError for another scheme.
    """
    if not url.startswith(SCHEMES):
        raise ValueError(f"a Redis URL must start with one of {', '.join(SCHEMES)}")
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "socket_read_size": _READ_BYTES,
        "retry": Retry(
            ExponentialBackoff(cap=_MAX_PAUSE_S, base=0.01),
            retries=round(patience_s / _MAX_PAUSE_S),
            supported_errors=(redis.ConnectionError, redis.TimeoutError),
        ),
    }
    return redis.Redis.from_url(url, **options)


def check_access(**urls: str) -> None:
    """Before anything is started for them. Only warns of a Redis that is away: it may come.

    urls: by the name of their setting, for errors, which show no password; empty ones and the memory store
    are passed over. Raises ValueError for a URL that can't be used and where Redis refuses this client: a
    wrong password, no such database, no rights.
    """
    for url, name in {url: name for name, url in reversed(urls.items())}.items():
        if url and url != MEMORY_STORE:
            _check_one(name, url)


def _check_one(name: str, url: str) -> None:
    try:
        client = connect(url)
        place = urlsplit(url)
        where = f"{place.hostname}:{place.port or 6379}" if place.hostname else place.path
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    try:
        client.ping()
    except (redis.AuthenticationError, redis.ResponseError) as error:
        no_password = isinstance(error, redis.AuthenticationError) or "authenticat" in str(error)
        reason = "the password is wrong or missing" if no_password else error
        raise ValueError(f"{name}: Redis at {where} refuses this client: {reason}") from None
    except (redis.RedisError, OSError):
        log.warning("%s: Redis at %s can't be reached; waiting for it", name, where)
    finally:
        client.close()
