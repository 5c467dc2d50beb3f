"""The blob store: bytes by content key, with a lifetime and a cap that refuses writes.

Bytes travel between processes and machines through it, never inside messages. A key names its content, so
writing it again changes nothing but its lifetime. At its cap the store refuses: it never evicts what somebody
waits for, nor, where Redis is the broker too, a queue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from workers.cluster.names import MEMORY_STORE

if TYPE_CHECKING:
    import redis

DEFAULT_CAP_BYTES = 2 << 30
_PIECE_BYTES = 1 << 16


class BlobStoreFull(Exception):
    """The write would pass the cap."""


class BlobStoreUnavailable(Exception):
    """The store could not be reached, or did not answer in time."""


class BlobStore(Protocol):
    """Every method may raise BlobStoreUnavailable. Keys are short ASCII texts."""

    def put(self, key: str, data: bytes | bytearray | memoryview, ttl_s: float) -> None:
        """Keeps a copy for `ttl_s` from now. Raises BlobStoreFull."""
        ...

    def get(self, key: str) -> bytes | None: ...

    def exists(self, key: str) -> bool: ...

    def delete(self, key: str) -> None: ...

    def renew(self, key: str, ttl_s: float) -> bool:
        """Another `ttl_s` from now for a blob that is there; False for one that isn't."""
        ...

    def oldest(self, count: int) -> list[str]:
        """The keys whose lifetimes end first, for a cache on top that makes room for itself."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the values that count towards the cap now."""
        ...

    def close(self) -> None: ...


class MemoryBlobStore:
    """The twin inside one process. It copies, as a server would, so callers share no buffer."""

    def __init__(
        self, cap_bytes: int = DEFAULT_CAP_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cap_bytes = cap_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[bytes, float]] = {}  # key -> (data, expiry)
        self._used = 0

    def put(self, key: str, data: bytes | bytearray | memoryview, ttl_s: float) -> None:
        copy = bytes(memoryview(data))
        with self._lock:
            self._expire()
            old = len(self._blobs[key][0]) if key in self._blobs else 0
            if self._used - old + len(copy) > self._cap_bytes:
                raise BlobStoreFull
            self._blobs[key] = (copy, self._clock() + ttl_s)
            self._used += len(copy) - old

    def get(self, key: str) -> bytes | None:
        with self._lock:
            self._expire()
            entry = self._blobs.get(key)
            return entry[0] if entry else None

    def exists(self, key: str) -> bool:
        with self._lock:
            self._expire()
            return key in self._blobs

    def delete(self, key: str) -> None:
        with self._lock:
            data, _ = self._blobs.pop(key, (b"", 0.0))
            self._used -= len(data)

    def renew(self, key: str, ttl_s: float) -> bool:
        with self._lock:
            self._expire()
            if key not in self._blobs:
                return False
            self._blobs[key] = (self._blobs[key][0], self._clock() + ttl_s)
            return True

    def oldest(self, count: int) -> list[str]:
        with self._lock:
            self._expire()
            return sorted(self._blobs, key=lambda key: self._blobs[key][1])[:count]

    def used_bytes(self) -> int:
        with self._lock:
            self._expire()
            return self._used

    def close(self) -> None:
        return

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, (_, expiry) in self._blobs.items() if expiry <= now]:
            self._used -= len(self._blobs.pop(key)[0])


# Accounting: a sorted set of keys by expiry (ms), a hash of sizes and a counter. Expired keys are subtracted
# first. KEYS: expiries, sizes, used. ARGV: key, bytes, ttl in ms, cap. Returns 1, or 0 when full.
_FORGET_EXPIRED = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[2], key) or 0)
  redis.call('HDEL', KEYS[2], key)
  redis.call('ZREM', KEYS[1], key)
end
"""
_RESERVE = (
    _FORGET_EXPIRED
    + """
local old = redis.call('HGET', KEYS[2], ARGV[1]) or 0
local used = redis.call('GET', KEYS[3]) or 0
if used - old + ARGV[2] > tonumber(ARGV[4]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('INCRBY', KEYS[3], ARGV[2] - old)
return 1
"""
)
_FORGET = """
local size = redis.call('HGET', KEYS[2], ARGV[1])
if size then
  redis.call('DECRBY', KEYS[3], size)
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[1], ARGV[1])
end
redis.call('UNLINK', ARGV[2])
return 1
"""
# KEYS: expiries, sizes, used. ARGV: key, name of the value, ttl in ms.
_RENEW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if redis.call('PEXPIRE', ARGV[2], ARGV[3]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], 'XX', now + ARGV[3], ARGV[1])
return 1
"""
_USED = _FORGET_EXPIRED + "return tonumber(redis.call('GET', KEYS[3]) or 0)"


class RedisBlobStore:
    """Blobs in Redis, beside whatever else lives there: the cap is our own count, not Redis's `maxmemory`."""

    def __init__(
        self, client: redis.Redis, cap_bytes: int = DEFAULT_CAP_BYTES, prefix: str = "vlm:blob"
    ) -> None:
        self._client = client
        self._cap_bytes = cap_bytes
        self._prefix = prefix
        self._reserve = client.register_script(_RESERVE)
        self._forget = client.register_script(_FORGET)
        self._renew = client.register_script(_RENEW)
        self._used = client.register_script(_USED)
        self._accounts = [f"{prefix}s:{name}" for name in ("expiries", "sizes", "used")]

    def put(self, key: str, data: bytes | bytearray | memoryview, ttl_s: float) -> None:
        from redis.exceptions import RedisError, ResponseError

        ttl_ms = max(1, round(ttl_s * 1000))
        size = memoryview(data).nbytes
        try:
            if not self._reserve(keys=self._accounts, args=[key, size, ttl_ms, self._cap_bytes]):
                raise BlobStoreFull
            # the reservation is forgotten at its expiry if this write is lost
            self._client.execute_command("SET", self._name(key), data, "PX", ttl_ms)
        except ResponseError as error:
            if not _out_of_memory(error):
                raise BlobStoreUnavailable from error
            # a server out of memory may refuse the clean-up too; the reservation then ends by itself
            with contextlib.suppress(BlobStoreUnavailable):
                self.delete(key)
            raise BlobStoreFull from None
        except RedisError as error:
            raise BlobStoreUnavailable from error

    def get(self, key: str) -> bytes | None:
        """Read in pieces: for ten megabytes the client's parser takes 8 ms so, and 30 ms in one reply."""
        name = self._name(key)

        def read() -> bytes | None:
            size = int(self._client.strlen(name))
            if size == 0:
                return b"" if self._client.exists(name) else None
            with self._client.pipeline(transaction=False) as pipeline:
                for start in range(0, size, _PIECE_BYTES):
                    pipeline.getrange(name, start, start + _PIECE_BYTES - 1)
                data = b"".join(pipeline.execute())
            # an expired blob is shorter than it was
            return data if len(data) == size else None

        data = self._guard(read)
        return data if isinstance(data, bytes) else None

    def exists(self, key: str) -> bool:
        return bool(self._guard(lambda: self._client.exists(self._name(key))))

    def delete(self, key: str) -> None:
        self._guard(lambda: self._forget(keys=self._accounts, args=[key, self._name(key)]))

    def renew(self, key: str, ttl_s: float) -> bool:
        args: list[str | int] = [key, self._name(key), max(1, round(ttl_s * 1000))]
        return bool(self._guard(lambda: self._renew(keys=self._accounts, args=args)))

    def oldest(self, count: int) -> list[str]:
        keys = self._guard(lambda: self._client.zrange(self._accounts[0], 0, count - 1))
        assert isinstance(keys, list)
        return [key.decode() for key in keys]

    def used_bytes(self) -> int:
        used = self._guard(lambda: self._used(keys=self._accounts))
        assert isinstance(used, int)
        return used

    def close(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}:{key}"

    def _guard(self, call: Callable[[], object]) -> object:
        from redis.exceptions import RedisError

        try:
            return call()
        except RedisError as error:
            raise BlobStoreUnavailable from error


def _out_of_memory(error: Exception) -> bool:
    """Redis at its own `maxmemory`, from a command or from inside a script."""
    return "OOM" in str(error) or type(error).__name__ == "OutOfMemoryError"


def open_store(
    url: str, cap_bytes: int = DEFAULT_CAP_BYTES, patience_s: float = 0.0, prefix: str = "vlm:blob"
) -> BlobStore:
    """`memory://`, or a `redis://`, `rediss://` or `unix://` URL; nothing is connected yet.

    patience_s: how long a call tries again while Redis is away. prefix: of the names in Redis; each has an
    account of its own. Raises ValueError for another scheme.
    """
    if url == MEMORY_STORE:
        return MemoryBlobStore(cap_bytes)
    from workers.cluster.redis_client import connect

    return RedisBlobStore(connect(url, patience_s), cap_bytes, prefix)
