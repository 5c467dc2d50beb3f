"""The local twin of the preprocess stage: a small pool of decode processes of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from preprocess.limits import BYTES_PER_PIXEL, ImageLimits
from preprocess.stage import PreprocessSpec
from preprocess.types import ImageError, ImageInfo, TileGrid
from workers.children.child import ONE_THREAD, Child, module_command
from workers.contract.stages import (
    MAX_ATTEMPTS,
    DecodeLimits,
    StageUnavailable,
    Urgency,
    deadline_passed,
    overloaded,
    processing_failed,
    unreachable,
)
from workers.contract.tiles_handle import ReceivedTiles, SealedTiles, TilesHandle
from workers.contract.turns import Turns

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    max_waiting: int = 512  # images
    max_inflight_bytes: int = 2 << 30  # of decoded images, over all processes
    limits: DecodeLimits = field(default_factory=DecodeLimits)


class DecoderDied(Exception):
    """The process ended, or did nothing for too long and was ended."""


class LocalPreprocess:
    """`PreprocessStage` over `python -m workers.local.decode_process` children, which never load torch."""

    def __init__(self, processes: int = 2, options: LocalOptions | None = None) -> None:
        self._num_processes = processes
        self._options = options or LocalOptions()
        self._turns = Turns(processes, self._options.max_inflight_bytes)
        # None: its process is to be started
        self._idle: asyncio.Queue[DecodeProcess | None] = asyncio.Queue()
        self._processes: set[DecodeProcess] = set()
        self._attempts: set[asyncio.Task[Any]] = set()
        self._waiting = 0
        self._closed = False
        self.restarts = 0

    @property
    def pids(self) -> list[int]:
        return sorted(process.pid for process in self._processes)

    async def start(self) -> None:
        """Starts the processes and waits until each has answered. Raises OSError and StageUnavailable."""
        for _ in range(self._num_processes):
            self._idle.put_nowait(self._spawn())
        try:
            await asyncio.gather(*(process.ready() for process in self._processes))
        except EOFError:
            raise StageUnavailable("preprocessing_unavailable", "A decode process did not start.") from None

    async def close(self) -> None:
        self._closed = True
        for task in self._attempts:
            task.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()

    async def tiles(
        self,
        data: bytes,
        info: ImageInfo,
        spec: PreprocessSpec,
        limits: ImageLimits,
        *,
        deadline_s: float,
        urgency: Urgency | None = None,
    ) -> TilesHandle:
        if self._waiting >= self._options.max_waiting:
            raise overloaded()
        frame = {
            "spec": spec.to_json(),
            "limits": limits.to_json(),
            "cpu_s": self._options.limits.cpu_within(deadline_s),
        }
        grid = spec.rule.grid(info.width, info.height, spec.detail)
        urgency = urgency or Urgency()
        failures = 0
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline_s):
                num_bytes = info.width * info.height * BYTES_PER_PIXEL
                async with self._turns.hold(num_bytes, urgency):
                    while failures < MAX_ATTEMPTS:
                        try:
                            background = self._is_background(urgency) and not failures
                            asked = {**frame, "background": background}
                            return await self._attempt(asked, data, grid, hang_s=deadline_s / 2)
                        except DecoderDied:
                            failures += 1
        except TimeoutError:
            # a deadline that passed while nothing but the queue was slow is no fault of the image
            if not failures:
                raise deadline_passed() from None
        finally:
            self._waiting -= 1
        raise processing_failed()

    def _is_background(self, urgency: Urgency) -> bool:
        """Not where an interactive image could have to wait for this one. An image that failed is tried again
        at full priority: what looked like a hang may have been others' work."""
        return urgency.priority == "batch" and self._num_processes > 1

    async def _attempt(
        self, frame: dict[str, Any], data: bytes, grid: TileGrid, hang_s: float
    ) -> TilesHandle:
        """A caller who leaves does not stop the attempt: its own limits end it, and the process is kept."""
        process = await self._idle.get()
        task = asyncio.create_task(self._use(process, frame, data, grid, hang_s))
        self._attempts.add(task)
        task.add_done_callback(self._forget_attempt)
        return await asyncio.shield(task)

    def _forget_attempt(self, task: asyncio.Task[Any]) -> None:
        self._attempts.discard(task)
        if not task.cancelled():
            task.exception()

    async def _use(
        self,
        process: DecodeProcess | None,
        frame: dict[str, Any],
        data: bytes,
        grid: TileGrid,
        hang_s: float,
    ) -> TilesHandle:
        """What the process says of the image. One that dies, hangs or talks nonsense is replaced."""
        if process is None or process.ended_idle:  # no image is to blame
            process = await self._successor(process)
            if process is None:
                self._idle.put_nowait(None)
                raise unreachable()
        up = False
        try:
            async with asyncio.timeout(hang_s):
                await process.ready()
            up = True
            tiles = await _unless_hung(process, process.tiles(frame, data, grid), hang_s)
        except ImageError:
            self._idle.put_nowait(process)
            raise
        except Exception as error:
            if not isinstance(error, OSError | EOFError | TimeoutError):
                log.exception("a decode process is replaced")
            await self._replace(process)
            raise (DecoderDied() if up else unreachable()) from None
        self._idle.put_nowait(process)
        return tiles

    async def _replace(self, process: DecodeProcess) -> None:
        if self._closed:
            self._processes.discard(process)
            await process.kill()
        else:
            self._idle.put_nowait(await self._successor(process))

    async def _successor(self, process: DecodeProcess | None) -> DecodeProcess | None:
        """None where the system has no room for a process now: the next image tries again."""
        if process is not None:
            self._processes.discard(process)
            await process.kill()
        try:
            started = self._spawn()
        except OSError:
            log.warning("a decode process can't be started", exc_info=True)
            return None
        self.restarts += 1
        return started

    def _spawn(self) -> DecodeProcess:
        process = DecodeProcess(self._options.limits.memory_bytes)
        self._processes.add(process)
        return process


class DecodeProcess:
    """A child and the socket to it; its first frame says that it is up."""

    def __init__(self, memory_bytes: int) -> None:
        command = [*module_command("workers.local.decode_process"), "--memory-bytes", str(memory_bytes)]
        self._child = Child(command, environment=ONE_THREAD)
        self._starting = asyncio.Lock()
        self._up = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended_idle(self) -> bool:
        """It came up and is gone; asked between two calls."""
        return self._up and self._child.exit_status is not None

    @property
    def cpu_s(self) -> float:
        """Processor time used so far; 0 for one that is gone."""
        try:
            times = psutil.Process(self._child.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    async def ready(self) -> None:
        """Raises EOFError or OSError when the child can't start."""
        async with self._starting:
            if not self._up:
                await self._child.receive()
                self._up = True

    async def tiles(self, frame: dict[str, Any], data: bytes, grid: TileGrid) -> TilesHandle:
        """Raises ImageError for what the child refuses, OSError or EOFError when it is gone, ValueError or
        KeyError when it talks nonsense: something else than tiles of this grid."""
        await self._child.send(frame, data)
        reply, payload, descriptor = await self._child.receive()
        if descriptor is not None:
            return SealedTiles(descriptor, grid)
        if reply["op"] == "error":
            raise ImageError(reply["code"], reply["message"])
        return ReceivedTiles(payload, grid)

    async def kill(self) -> None:
        await self._child.end()


async def _unless_hung(process: DecodeProcess, call: Coroutine[Any, Any, T], hang_s: float) -> T:
    """What `call` returns or raises. Raises TimeoutError once the process used no processor time for
    `hang_s`; one that does is slow, and ended by its limit."""
    task = asyncio.ensure_future(call)
    try:
        while True:
            used_s = process.cpu_s
            done, _ = await asyncio.wait({task}, timeout=hang_s)
            if done:
                return task.result()
            if process.cpu_s == used_s:
                raise TimeoutError
    finally:
        task.cancel()
