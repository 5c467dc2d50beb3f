"""Who works on what, kept in Redis: leases, attempts, waiters and verdicts of one kind of work.

A piece of work has a content key, so doing it twice does no harm, and nothing here has to be exact:
- waiters: who wants the result, renewed by asking; a message that no waiter wants any more is dropped.
- claim: a message for it is under way; ends when a worker takes it up, or by itself if the message is lost.
- lease: a worker is at it, renewed by its heartbeat. No lease after an attempt began means that it died.
- attempts: how often it was begun for those who wait; a piece that has used them all is failed, whoever
  notices.
- verdict: why it failed, for those who waited then. Later requests begin anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from llm.request import Priority
from workers.cluster.redis_clock import RedisClock

if TYPE_CHECKING:
    import redis

LEASE_S = 2.0
HEARTBEAT_S = 0.5
WAITER_S = 10.0
CLAIM_S = 10.0
ATTEMPTS_S = 600.0
VERDICT_S = 30.0  # at most; a waiter asks twice a second
WAIT_KEPT_S = 60.0
WAIT_WEIGHT = 0.1  # of the latest wait in the mean

# KEYS of every script: waiters, claim, lease, attempts, verdict, judged (waiters that the verdict is for)
_LOOK = """
local verdict = redis.call('SISMEMBER', KEYS[6], ARGV[1]) == 1 and redis.call('GET', KEYS[5])
if verdict then return {0, '0', verdict} end
local t = redis.call('TIME')
local known = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', t[1])
if not known and redis.call('ZCARD', KEYS[1]) == 0 then redis.call('DEL', KEYS[4]) end
redis.call('ZADD', KEYS[1], t[1] + ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {redis.call('EXISTS', KEYS[3]), redis.call('GET', KEYS[4]) or '0', ''}
"""
_LEAVE = """
local t = redis.call('TIME')
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('SREM', KEYS[6], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', t[1])
if redis.call('EXISTS', KEYS[6]) == 0 then redis.call('DEL', KEYS[5]) end
return redis.call('ZCARD', KEYS[1])
"""
_FAIL = """
local t = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', t[1])
local waiters = redis.call('ZRANGE', KEYS[1], 0, -1)
redis.call('DEL', KEYS[1], KEYS[3], KEYS[4])
if #waiters == 0 then return 0 end
for _, waiter in ipairs(waiters) do redis.call('SADD', KEYS[6], waiter) end
redis.call('PEXPIRE', KEYS[6], ARGV[2])
redis.call('SET', KEYS[5], ARGV[1], 'PX', ARGV[2])
return #waiters
"""
_BEGIN = """
local t = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', t[1])
redis.call('DEL', KEYS[2])
if redis.call('ZCARD', KEYS[1]) == 0 then return 'unwanted' end
if redis.call('EXISTS', KEYS[3]) == 1 then return 'running' end
if tonumber(redis.call('GET', KEYS[4]) or 0) >= tonumber(ARGV[3]) then return 'exhausted' end
redis.call('INCR', KEYS[4])
redis.call('PEXPIRE', KEYS[4], ARGV[4])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return 'begun'
"""
_BEAT = """
local owner = redis.call('GET', KEYS[3])
if not owner or owner == ARGV[1] then redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2]) end
local t = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', t[1])
return redis.call('ZCARD', KEYS[1])
"""
_END = """
if redis.call('GET', KEYS[3]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
if ARGV[2] == 'done' then redis.call('DEL', KEYS[4]) end
if ARGV[2] == 'undone' and redis.call('EXISTS', KEYS[4]) == 1 then redis.call('DECR', KEYS[4]) end
return 1
"""

Outcome = Literal["done", "failed", "undone"]


@dataclass(frozen=True, slots=True)
class WorkState:
    running: bool
    attempts: int
    verdict: tuple[str, str] | None  # code, message


class WorkLedger:
    """Every method may raise `redis.RedisError`."""

    def __init__(self, client: redis.Redis, kind: str) -> None:
        self._client = client
        self._prefix = f"vlm:{kind}"
        self.channel = f"{self._prefix}:done"
        self.clock = RedisClock(client)
        self._look, self._leave, self._fail, self._begin, self._beat, self._end = (
            client.register_script(script) for script in (_LOOK, _LEAVE, _FAIL, _BEGIN, _BEAT, _END)
        )

    def look(self, key: str, waiter: str) -> WorkState:
        """How the work stands; asking keeps `waiter` on the list for WAITER_S."""
        running, attempts, verdict = self._look(keys=self._keys(key), args=[waiter, round(WAITER_S)])
        code_and_message = json.loads(verdict) if verdict else None
        return WorkState(bool(running), int(attempts), tuple(code_and_message) if code_and_message else None)

    def leave(self, key: str, waiter: str) -> int:
        """How many still wait."""
        return int(self._leave(keys=self._keys(key), args=[waiter]))

    def claim(self, key: str, priority: Priority = "interactive") -> bool:
        """True for the one who has to send the message; an interactive one is sent past one of batch work."""
        name = self._keys(key)[1]
        if self._client.set(name, priority, px=_ms(CLAIM_S), nx=True):
            return True
        if priority == "batch" or self._client.get(name) != b"batch":
            return False
        return bool(self._client.set(name, priority, px=_ms(CLAIM_S)))

    def unclaim(self, key: str) -> None:
        self._client.delete(self._keys(key)[1])

    def begin(self, key: str, token: str, max_attempts: int) -> str:
        """`begun`, or why not: `unwanted`, `running` elsewhere, `exhausted`."""
        args: list[str | int] = [token, _ms(LEASE_S), max_attempts, _ms(ATTEMPTS_S)]
        return bytes(self._begin(keys=self._keys(key), args=args)).decode()

    def beat(self, key: str, token: str) -> int:
        """Renews the lease, or takes it again if Redis forgot it meanwhile. Returns how many still wait."""
        return int(self._beat(keys=self._keys(key), args=[token, _ms(LEASE_S)]))

    def end(self, key: str, token: str, outcome: Outcome) -> None:
        """`undone` takes the attempt back: it was not the work's fault. Wakes the waiters."""
        self._end(keys=self._keys(key), args=[token, outcome])
        self.announce(key)

    def fail(self, key: str, code: str, message: str) -> None:
        """The verdict for everyone who waits now, until they leave; its attempts are over."""
        self._fail(keys=self._keys(key), args=[json.dumps([code, message]), _ms(VERDICT_S)])

    def note_wait(self, wait_s: float) -> None:
        """How long the message waited that a worker takes up now."""
        old = self.wait_s()
        mean = wait_s if old is None else old + WAIT_WEIGHT * (wait_s - old)
        self._client.set(f"{self._prefix}:wait", repr(mean), px=_ms(WAIT_KEPT_S))

    def wait_s(self) -> float | None:
        """Mean of the waits noted, weighted to the latest; None if there were none for WAIT_KEPT_S."""
        value = cast("bytes | None", self._client.get(f"{self._prefix}:wait"))
        return None if value is None else float(value)

    def announce(self, key: str) -> None:
        self._client.publish(self.channel, key)

    def _keys(self, key: str) -> list[str]:
        names = ("waiters", "claim", "lease", "attempts", "verdict", "judged")
        return [f"{self._prefix}:{name}:{key}" for name in names]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
