"""Single flight over machines: one worker does a piece of work under a lease, whoever waits watches it.

worker:  `Lease.take`, the work, how it ended; a heartbeat holds the lease meanwhile.
waiter:  `Waiter.advance` until there is a result: it sends the message if nobody has, and sends it again
         when a worker's heartbeat stops. Announcements only make it ask sooner, so losing one costs no more
         than _POLL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import redis.asyncio

from llm.request import Priority
from workers.cluster.ledger import HEARTBEAT_S, Outcome, WorkLedger
from workers.cluster.redis_client import AWAY, AWAY_PAUSE_S
from workers.contract.loops import LoopThread, keep_going
from workers.contract.stages import MAX_ATTEMPTS

T = TypeVar("T")
Verdict = tuple[str, str]  # code, message

_POLL_S = 0.5  # how soon a lost announcement or a lost lease is noticed
UNWANTED_BEATS = 4


class Judged(Exception):
    """The work can't be done for those who wait now."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Lease:
    """One attempt at a piece of work. The lease is renewed from a thread while the work's native code runs.

    As a context it ends with `outcome`.
    """

    def __init__(self, ledger: WorkLedger, key: str, token: str) -> None:
        """Of work that was begun with `token`; `take` is the way to one."""
        self.outcome: Outcome = "failed"
        self._ledger, self._key, self._token = ledger, key, token
        self._unwanted = 0  # beats in a row
        self._loop = LoopThread("the heartbeat of a lease", self._beat, AWAY, HEARTBEAT_S)
        self._loop.start()

    @classmethod
    def take(cls, ledger: WorkLedger, key: str, exhausted: Verdict) -> Lease | None:
        """None if nobody wants the work, if it is done elsewhere, or if its attempts are used up, which is
        the verdict `exhausted`. Raises `redis.RedisError`."""
        token = uuid.uuid4().hex
        begun = ledger.begin(key, token, MAX_ATTEMPTS)
        if begun == "exhausted":
            ledger.fail(key, *exhausted)
            ledger.announce(key)
        return cls(ledger, key, token) if begun == "begun" else None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self.outcome)

    @property
    def wanted(self) -> bool:
        """False once several beats in a row found nobody who waits: one may fall between a Redis that forgot
        and waiters who ask again."""
        return self._unwanted < UNWANTED_BEATS

    def judge(self, code: str, message: str) -> None:
        """The verdict for those who wait. Raises `redis.RedisError`."""
        self._ledger.fail(self._key, code, message)

    def end(self, outcome: Outcome) -> None:
        """`undone` counts as no attempt. Wakes whoever waits. Raises `redis.RedisError`."""
        self._loop.close()
        self._ledger.end(self._key, self._token, outcome)

    def _beat(self) -> None:
        self._loop.pause(HEARTBEAT_S)
        if not self._loop.is_closing:
            is_wanted = self._ledger.beat(self._key, self._token)
            self._unwanted = 0 if is_wanted else self._unwanted + 1


class Waiters:
    """Those of this process who wait for one kind of work. Used from one event loop."""

    def __init__(self, ledger: WorkLedger, url: str) -> None:
        """url: of the Redis that `ledger` is in."""
        self.ledger = ledger
        self._url = url
        self._by_key: dict[str, set[Waiter]] = {}

    async def listen(self) -> None:
        """Wakes waiters at announcements, for ever; without a connection they poll."""
        channel = self.ledger.channel

        async def until_away() -> None:
            async with redis.asyncio.from_url(self._url) as client, client.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                async for message in pubsub.listen():
                    if message["type"] == "message":
                        self._wake(message["data"].decode())

        await keep_going(f"the listener on {channel}", until_away, AWAY, AWAY_PAUSE_S)

    def _wake(self, key: str) -> None:
        for waiter in self._by_key.get(key, ()):
            waiter.woken.set()

    def add(self, key: str, waiter: Waiter) -> None:
        self._by_key.setdefault(key, set()).add(waiter)

    def discard(self, key: str, waiter: Waiter) -> None:
        waiters = self._by_key.get(key, set())
        waiters.discard(waiter)
        if not waiters:
            self._by_key.pop(key, None)


class Waiter:
    """Waits for pieces of work. `advance` and `leave_ledger` run in any thread, the rest on the loop."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._ledger = waiters.ledger
        self._id = uuid.uuid4().hex
        self._keys: set[str] = set()
        self.woken = asyncio.Event()

    def join(self, key: str) -> None:
        self._keys.add(key)
        self._waiters.add(key, self)

    def leave(self) -> None:
        """Is woken no more."""
        for key in self._keys:
            self._waiters.discard(key, self)

    async def pause(self) -> None:
        """Until it is worth while to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self.woken.wait()
        self.woken.clear()

    def advance(
        self,
        key: str,
        find: Callable[[], T | None],
        send: Callable[[], None],
        exhausted: Verdict,
        *,
        priority: Priority = "interactive",
        on_running: Callable[[], None] = lambda: None,
    ) -> T | None:
        """What `find` finds; else None, and somebody is at the work, or has the message that asks for it.

        The lease is read before `find` looks: a worker puts its result before it ends its lease.
        send: is called if nobody has asked. exhausted: the verdict if all attempts are used up.
        on_running: is called if somebody is at the work.

        Raises `Judged`, and this waiter has left the ledger then: if it goes on, it waits anew. Raises
        `redis.RedisError` and what `find` and `send` raise.
        """
        state = self._ledger.look(key, self._id)
        verdict = state.verdict
        if verdict is None:
            if state.running:
                on_running()
                return None
            if (found := find()) is not None:
                return found
            if state.attempts >= MAX_ATTEMPTS:
                verdict = exhausted
                self._ledger.fail(key, *exhausted)
                self._ledger.announce(key)
        if verdict is not None:
            self._ledger.leave(key, self._id)
            raise Judged(*verdict)
        if self._ledger.claim(key, priority):
            try:
                send()
            except BaseException:
                self._ledger.unclaim(key)
                raise
        return None

    def leave_ledger(self) -> bool:
        """True for the last of those who wanted what this one did. Raises `redis.RedisError`."""
        left = [self._ledger.leave(key, self._id) for key in self._keys]
        return bool(left) and not any(left)
