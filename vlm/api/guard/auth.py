"""Who calls: bearer keys, kept as hashes, with a namespace and a rate limit each.

The keys file is TOML:

    [[keys]]
    name = "reports"
    sha256 = "..."            # of the key itself: printf %s KEY | sha256sum
    namespace = "reports"     # images, files and caches are shared within it; default: the name
    requests_per_minute = 60  # 0 is off; default: the server's setting
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from vlm.config import ConfigError, ServeConfig
from vlm.requests.errors import ApiError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    sha256: str
    namespace: str = ""
    requests_per_minute: int = -1  # -1: the server's setting


@dataclass(frozen=True, slots=True)
class Caller:
    name: str = ""
    namespace: str = ""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Raises ConfigError for a file that is missing, malformed or empty."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the keys file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError("the keys file is not valid TOML") from None
    rows = table.get("keys")
    if set(table) != {"keys"} or not isinstance(rows, list) or not rows:
        raise ConfigError("the keys file must hold [[keys]] tables and nothing else")
    keys = tuple(_read_key(row) for row in rows)
    if len({key.name for key in keys}) < len(keys) or len({key.sha256 for key in keys}) < len(keys):
        raise ConfigError("two keys of the keys file have the same name or the same hash")
    return keys


def _read_key(row: object) -> ApiKey:
    known = {f.name for f in fields(ApiKey)}
    if not isinstance(row, dict) or not {"name", "sha256"} <= row.keys() <= known:
        raise ConfigError(
            "each key needs a name and a sha256, and may have a namespace and requests_per_minute"
        )
    name, namespace = row["name"], row.get("namespace", row["name"])
    if not all(isinstance(text, str) and _NAME.fullmatch(text) for text in (name, namespace)):
        raise ConfigError("names and namespaces of keys may hold letters, digits, '.', '_' and '-'")
    if not isinstance(row["sha256"], str) or not re.fullmatch(r"[0-9a-f]{64}", row["sha256"]):
        raise ConfigError("a key's sha256 must have 64 lowercase hex digits")
    rate = row.get("requests_per_minute", -1)
    if type(rate) is not int or rate < -1:
        raise ConfigError("a key's requests_per_minute must be a whole number")
    return ApiKey(name, row["sha256"], str(namespace), rate)


class KeyRing:
    """Default deny: once there are keys, only their holders pass."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_hash = {key.sha256: key for key in keys}

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def authenticate(self, authorization: str) -> tuple[Caller, ApiKey | None]:
        """Raises ApiError 401."""
        if not self._by_hash:
            return Caller(), None
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode()).hexdigest()
        key = self._by_hash.get(digest) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                401,
                "invalid_api_key",
                "A valid API key is required.",
                headers={"www-authenticate": "Bearer"},
            )
        return Caller(key.name, key.namespace), key


class RateLimiter:
    """A token bucket for each caller; a bucket holds a minute's worth at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # name -> (tokens, at)

    def take(self, name: str, per_minute: int) -> None:
        """Raises ApiError 429 with the time until the next token."""
        if per_minute <= 0:
            return
        now = self._clock()
        tokens, at = self._buckets.get(name, (float(per_minute), now))
        tokens = min(float(per_minute), tokens + (now - at) * per_minute / 60)
        if tokens < 1:
            self._buckets[name] = (tokens, now)
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"This key is limited to {per_minute} requests a minute.",
                retry_after_s=(1 - tokens) * 60 / per_minute,
            )
        self._buckets[name] = (tokens - 1, now)


def check_exposure(config: ServeConfig, keys: KeyRing) -> None:
    """Raises ConfigError before the service listens to the world without keys."""
    if keys or config.allow_public:
        return
    try:
        loopback = ipaddress.ip_address(config.host.strip("[]")).is_loopback
    except ValueError:
        loopback = config.host == "localhost"
    if not loopback:
        raise ConfigError(
            f"{config.host} can be reached by others, and no keys are set: "
            "name a keys_file in the [serve] table of the --config file, or give --allow-public if everyone "
            "may ask"
        )
