"""Runs batches beside interactive requests, and goes on where an earlier process stopped.

A row counts as done once its line is on disk. A restart reads the custom_ids of those lines and runs the
others. One process at a time runs the batches of a data directory; its lock passes on when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vlm.api.batches.batch_check import LineError, Place, check
from vlm.api.batches.batch_rows import (
    RowBook,
    RowResult,
    count_lines,
    encode_expired,
    encode_row,
    error_result,
    read_row,
)
from vlm.api.batches.batch_store import ERRORS, INDEX, INPUT, OUTPUT, BatchJob, BatchStore, Status
from vlm.api.batches.row_turns import RowTurns
from vlm.api.guard.auth import Caller
from vlm.api.storage.files import FileStore
from vlm.requests.lines import NOT_STRICT
from workers.contract.loops import keep_going
from workers.contract.streams import end_tasks

log = logging.getLogger(__name__)

WINDOW = 24  # rows under way, of one key's batches: what the engine runs together, and half more
SPARE = 4  # more of them, for other keys
LOCK_RETRY_S = 1.0
FAULT_RETRY_S = 5.0
POLL_S = 1.0

RunRow = Callable[[Caller, dict[str, Any], float], Awaitable[RowResult]]
"""(caller, body, deadline in Unix seconds). Keeps trying while the service is busy; raises nothing."""


@dataclass(eq=False)
class _Live:
    """A batch that this process runs."""

    batch: BatchJob
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    completed: int = 0
    failed: int = 0

    def counted(self, book: RowBook) -> None:
        self.completed, self.failed = book.output.count, book.errors.count


class BatchRunner:
    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        run_row: RunRow,
        *,
        clock: Callable[[], float] = time.time,
        window: int = WINDOW,
    ) -> None:
        self.store = store
        self._files = files
        self._run_row = run_row
        self._clock = clock
        self._turns = RowTurns(window, SPARE)
        self._checks = RowTurns(1, 1)  # inputs that are checked at once
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._lock_fd: int | None = None

    async def start(self) -> None:
        """Returns at once; unfinished batches go on as soon as no other process holds them."""
        self._keeper = asyncio.create_task(keep_going("the runner of batches", self._take_over))

    async def close(self) -> None:
        """Stops rows under way; what is on disk stays, the rest runs after the next start."""
        await end_tasks(*(task for task in (self._keeper, *self._tasks) if task))
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def _take_over(self) -> bool:
        """Touches nothing where there never was a batch."""
        if self.store.exists() and await self.take_lock():
            return True
        await asyncio.sleep(LOCK_RETRY_S)
        return False

    async def take_lock(self) -> bool:
        """Whether this process runs the batches of its data directory, from now on if not before."""
        if self._lock_fd is not None:
            return True
        with contextlib.suppress(OSError):
            lock_fd = self._lock_fd = self.store.lock()
            try:
                unfinished = await asyncio.to_thread(self.store.unfinished)
            except BaseException:
                self._lock_fd = None  # the next runner begins with those batches
                os.close(lock_fd)
                raise
            for batch in unfinished:
                self.add(batch)
        return self._lock_fd is not None

    def add(self, batch: BatchJob) -> None:
        """Starts a batch that is on disk."""
        if batch.id not in self._live:
            live = self._live[batch.id] = _Live(batch)
            task = asyncio.create_task(self._run(live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def cancel(self, batch: BatchJob) -> BatchJob:
        """The batch as it is from now on. Rows under way are dropped, rows that are done are published."""
        await asyncio.to_thread(self.store.ask_to_cancel, batch)
        if live := self._live.get(batch.id):
            live.cancelled.set()
        return await self.current(batch)

    async def current(self, batch: BatchJob) -> BatchJob:
        """With counts as of now, and cancelling from the moment it was asked for."""
        live = self._live.get(batch.id)
        if live is not None and not batch.is_final:
            batch = replace(live.batch, completed=live.completed, failed=live.failed)
        elif not batch.is_final:
            folder = self.store.folder(batch)
            completed = await asyncio.to_thread(count_lines, folder / OUTPUT)
            batch = replace(
                batch, completed=completed, failed=await asyncio.to_thread(count_lines, folder / ERRORS)
            )
        if not batch.is_final and await asyncio.to_thread(self.store.cancel_asked, batch):
            return replace(batch, status="cancelling", cancelling_at=batch.cancelling_at or self._now())
        return batch

    def _now(self) -> int:
        return int(self._clock())

    async def _save(self, live: _Live, status: Status, **changes: Any) -> None:
        batch = replace(live.batch, status=status, completed=live.completed, failed=live.failed, **changes)
        await asyncio.to_thread(self.store.save, batch)
        live.batch = batch

    async def _run(self, live: _Live) -> None:
        """To the batch's end: a full disk is waited out, a fault of ours fails the batch."""
        try:
            while True:
                try:
                    await self._steps(live)
                    return
                except OSError:
                    log.exception("batch waits")
                    await asyncio.sleep(FAULT_RETRY_S)
        except Exception:
            log.exception("batch failed")
            fault = LineError("internal_error", "The server failed to process the batch.")
            await self._save(live, "failed", errors=(fault,), failed_at=self._now())
        finally:
            self._live.pop(live.batch.id, None)

    async def _steps(self, live: _Live) -> None:
        if self.store.cancel_asked(live.batch):
            live.cancelled.set()
        checked = (self.store.folder(live.batch) / INDEX).exists()
        if live.batch.status == "validating" or (live.batch.status == "in_progress" and not checked):
            total, errors = await self._check(live.batch)
            if errors:
                await self._save(live, "failed", errors=tuple(errors), failed_at=self._now())
                await asyncio.to_thread(self.store.forget_rows, live.batch)
                return
            begun_at = live.batch.in_progress_at or self._now()
            await self._save(live, "in_progress", total=total, in_progress_at=begun_at)
        if live.batch.status == "in_progress":
            ends_as = await self._run_rows(live)
            more = {"cancelling_at": self._now()} if ends_as == "cancelled" else {}
            await self._save(live, "finalizing", ends_as=ends_as, finalizing_at=self._now(), **more)
        await self._publish(live)

    async def _check(self, batch: BatchJob) -> tuple[int, list[LineError]]:
        folder = self.store.folder(batch)
        async with self._checks.turn(batch.caller, batch.id):
            return await check(folder / INPUT, batch.endpoint, folder / INDEX)

    async def _run_rows(self, live: _Live) -> Status:
        """How the batch ends: completed, cancelled or expired."""
        book = await asyncio.to_thread(RowBook, self.store.folder(live.batch), live.batch.total)
        live.counted(book)
        stop = asyncio.create_task(self._stop(live))
        work = asyncio.create_task(self._feed(live, book))
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await end_tasks(work)
            if not work.cancelled():
                work.result()
                return "completed"
            await book.flush()  # rows that were being written when their task was cancelled
            if (ends_as := stop.result()) == "expired":
                await self._expire_rest(book)
            return ends_as
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await end_tasks(work, stop)
            await book.flush()
            live.counted(book)

    async def _stop(self, live: _Live) -> Status:
        """Why to stop. Polls: Unix time may be set, and another process may have been asked to cancel."""
        while (left_s := live.batch.expires_at - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(live.cancelled.wait(), min(POLL_S, left_s))
            if live.cancelled.is_set() or await asyncio.to_thread(self.store.cancel_asked, live.batch):
                return "cancelled"
        return "expired"

    async def _feed(self, live: _Live, book: RowBook) -> None:
        batch = live.batch
        async with asyncio.TaskGroup() as group:
            async for places in book.left():
                for place in places:
                    await self._turns.acquire(batch.caller, batch.id)
                    task = group.create_task(self._row(live, place, book))
                    # not in the row itself: a task that is cancelled before it begins runs no line of it
                    task.add_done_callback(lambda _: self._turns.release(batch.caller, batch.id))

    async def _row(self, live: _Live, place: Place, book: RowBook) -> None:
        batch = live.batch
        row = await asyncio.to_thread(read_row, self.store.folder(batch) / INPUT, place, batch.endpoint)
        if row.is_strict:
            caller = Caller(batch.caller, batch.namespace)
            result = await self._run_row(caller, row.body, float(batch.expires_at))
        else:
            result = error_result(400, *NOT_STRICT)
        target = book.output if result.is_answer else book.errors
        await target.append(await asyncio.to_thread(encode_row, row.custom_id, result), (place.number,))
        live.counted(book)

    async def _expire_rest(self, book: RowBook) -> None:
        async for places in book.left():
            if places:
                lines = b"".join(encode_expired(place.custom_id) for place in places)
                await book.errors.append(lines, [place.number for place in places])

    async def _publish(self, live: _Live) -> None:
        """Idempotent: rows are linked into the file store, and forgotten once the state names them."""
        batch = live.batch
        ends_as = batch.ends_as or "completed"
        ids = {}
        for name, key in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            ids[key] = await asyncio.to_thread(self._publish_file, batch, name)
        live.completed, live.failed = batch.completed, batch.failed
        await self._save(live, ends_as, **ids, **{f"{ends_as}_at": self._now()})
        await asyncio.to_thread(self.store.forget_rows, batch)

    def _publish_file(self, batch: BatchJob, name: str) -> str | None:
        path = self.store.folder(batch) / name
        if not path.exists() or not path.stat().st_size:
            return None
        link = path.with_suffix(".publish")
        link.unlink(missing_ok=True)
        os.link(path, link)
        filename = f"{batch.id}_{'output' if name == OUTPUT else 'error'}.jsonl"
        return self._files.adopt(batch.namespace, filename, "batch_output", link).id
