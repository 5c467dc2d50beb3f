"""The engine in a process of its own: the loop in the child, and the client that keeps it alive.

Frames (`workers.contract.messages`) travel over a socket pair. The child dies with its parent (end of file),
the parent starts a new child when one dies and tells every stream that was open.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from llm.request import Event, Failed, Request, RequestError, VisualKey
from preprocess.types import TileGrid, Tiles
from preprocess.wire import from_bytes
from workers.children.child import Child
from workers.children.frames import Frame, FrameSocket
from workers.contract.engine_client import ENGINE_DIED, SHUTTING_DOWN, EngineRefused, EngineUnavailable
from workers.contract.faults import BAD_TILES, UNREADABLE
from workers.contract.loops import keep_going
from workers.contract.messages import event_from_json, event_to_json, request_from_json, request_to_json
from workers.contract.streams import StreamTable, end_tasks
from workers.contract.tiles_handle import SealedTiles, TilesHandle
from workers.contract.versions import note_dropped
from workers.local.progress import LOOK_S, STALL_S, Progress, StallWatch, open_shared

log = logging.getLogger(__name__)

IDLE_TICK_S = 0.5
_GRACE_S = 2.0  # for a step under way, once the child finds its socket closed


class Runner(Protocol):
    """What the child's loop steps: this project's own engine, or another one."""

    @property
    def has_work(self) -> bool: ...

    def info(self) -> dict[str, Any]: ...

    def submit(self, request: Request) -> None:
        """Raises `RequestError` for what can never be served."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def put_tiles(self, key: VisualKey, tiles: Tiles) -> None: ...

    def fail_tiles(self, key: VisualKey, code: str, message: str) -> None: ...

    def step(self) -> list[Event]: ...

    def stats(self) -> dict[str, Any]: ...

    def clear_cache(self) -> None: ...


def serve(connection: socket.socket, runner: Runner, progress: Progress) -> None:
    """The child's loop: take what arrived, do one step, send what happened. Ends with the parent, which
    watches `progress`; what `runner` computes adds to it from inside a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    frames = FrameSocket(connection)
    with contextlib.suppress(EOFError, ConnectionError, BrokenPipeError):
        frames.send({"op": "ready", "info": runner.info()})
        while True:
            while frames.readable(0.0 if runner.has_work else IDLE_TICK_S):
                progress.tick()
                _handle(frames, runner, frames.receive())
            progress.tick()
            if runner.has_work and (events := runner.step()):
                frames.send({"op": "events", "events": [event_to_json(event) for event in events]})


def refuse(connection: socket.socket, reason: str) -> None:
    """The child's only word where its settings can't work, instead of `serve`."""
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        FrameSocket(connection).send({"op": "refused", "reason": reason})


def _handle(frames: FrameSocket, runner: Runner, frame: Frame) -> None:
    message = frame.header
    match message["op"]:
        case "submit":
            failed = _submit(runner, message["request"])
            if failed is not None:
                frames.send({"op": "events", "events": [event_to_json(failed)]})
        case "cancel":
            runner.cancel(message["id"])
        case "tiles":
            _put_tiles(runner, frame)
            frames.send({"op": "reply", "reply": message["reply"], "value": None})
        case "no_tiles":
            runner.fail_tiles(VisualKey(message["key"]), message["code"], message["message"])
        case "stats":
            frames.send({"op": "reply", "reply": message["reply"], "value": runner.stats()})
        case "clear":
            runner.clear_cache()
            frames.send({"op": "reply", "reply": message["reply"], "value": None})
        case other:
            note_dropped("kind of frame", other)


def _submit(runner: Runner, value: dict[str, Any]) -> Failed | None:
    try:
        request = request_from_json(value)
    except ValueError:
        log.exception("a request could not be read")
        return Failed(str(value.get("id")), *UNREADABLE)
    try:
        runner.submit(request)
    except RequestError as error:
        return Failed(request.id, error.code, error.message, error.param)
    return None


def _put_tiles(runner: Runner, frame: Frame) -> None:
    """Those that can't be read fail the requests that wait for them."""
    key = VisualKey(frame.header["key"])
    try:
        grid = TileGrid(*frame.header["grid"])
        if frame.descriptor is None:
            tiles = from_bytes(frame.payload, grid)
        else:
            handle = SealedTiles(frame.descriptor, grid)
            tiles = handle.open()
            handle.close()
    except (ValueError, OSError):
        log.exception("tiles could not be read")
        runner.fail_tiles(key, *BAD_TILES)
    else:
        runner.put_tiles(key, tiles)


class EngineProcess:
    """`EngineClient` over a child process; `command` gets `--fd N --progress-fd N` appended."""

    def __init__(
        self,
        command: list[str],
        *,
        stall_s: float = STALL_S,
        start_stall_s: float = 300.0,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A child without any progress for `stall_s` hangs and is replaced; until it is up, for
        `start_stall_s`, since a stage of loading (an import, the weights) counts as one piece."""
        self._command = command
        self._stall_s = stall_s
        self._start_stall_s = start_stall_s
        self._look_s = look_s
        self._clock = clock
        self._streams = StreamTable()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._reply_ids = itertools.count()
        self._child: Child | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._refusal: str | None = None
        self.restarts = 0
        self.info: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        """The child is up and takes requests, however long its step under way may be."""
        return self._up.is_set()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Starts the child and waits until it is up. Raises `EngineUnavailable` if its first start fails,
        and `EngineRefused` where its settings can't work."""
        self._keeper = asyncio.create_task(
            keep_going("the engine process", self._run_child_to_its_end, expected=(EngineUnavailable,))
        )
        up = asyncio.create_task(self._up.wait())
        done, _ = await asyncio.wait({up, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        if up not in done:
            up.cancel()
            await self.close()
            if self._refusal is not None:
                raise EngineRefused(self._refusal)
            raise EngineUnavailable("the engine process did not start; its own message is above")

    async def close(self) -> None:
        if self._keeper:
            self._keeper.cancel()  # once: it ends the child
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._stop_child()
        self._streams.fail_all(*SHUTTING_DOWN)

    async def _run_child_to_its_end(self) -> bool:
        """True if the first never came up: a start-up error, not a crash. Raises why it ended otherwise."""
        end: Exception = EngineUnavailable("it ended")
        try:
            await self._run_child()
        except Exception as error:
            end = error
        finally:
            was_up = self._up.is_set()
            self._up.clear()
            self._streams.fail_all(*ENGINE_DIED)
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(EngineUnavailable(ENGINE_DIED[1]))
            self._replies.clear()
            await self._stop_child()
        if not was_up and self.restarts == 0:
            log.debug("the engine process did not come up", exc_info=end)
            return True
        self.restarts += 1
        raise end

    async def _run_child(self) -> None:
        """Returns once the child has ended or hangs."""
        progress_fd = open_shared()
        progress = Progress.of_file(progress_fd)
        try:
            self._child = Child(
                [*self._command, "--progress-fd", str(progress_fd)],
                pass_fds=[progress_fd],
                environment={"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")},
            )
        finally:
            os.close(progress_fd)
        tasks = [asyncio.create_task(self._read(self._child)), asyncio.create_task(self._watch(progress))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            await end_tasks(*tasks)

    async def _read(self, child: Child) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                message = (await child.receive()).header
                try:
                    self._take(message)
                except (KeyError, TypeError, AttributeError):
                    log.exception("a frame of the engine process could not be read")

    async def _watch(self, progress: Progress) -> None:
        """Returns once the child hangs, and kills it: its streams wait for nothing more."""
        starting, running = (
            StallWatch(self._start_stall_s, self._clock),
            StallWatch(self._stall_s, self._clock),
        )
        hangs = False
        while not hangs:
            await asyncio.sleep(self._look_s)
            hangs = (running if self._up.is_set() else starting).look(progress.count)
        log.error("the engine process makes no progress: it is replaced")
        if self._child:
            self._child.signal(signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "ready":
                self.info = message.get("info", {})
                self._up.set()
            case "refused":
                self._refusal = message["reason"]
            case "events":
                for event in message["events"]:
                    self._take_event(event)
            case "reply":
                future = self._replies.pop(message["reply"], None)
                if future and not future.done():
                    future.set_result(message.get("value"))
            case other:
                note_dropped("kind of frame", other)

    def _take_event(self, value: dict[str, Any]) -> None:
        """One that can't be read ends its stream: what it would have said is missing."""
        try:
            event = event_from_json(value)
        except ValueError:
            log.exception("an event of the engine process could not be read")
            name = str(value.get("request_id"))
            self._cancel(name)
            event = Failed(name, *UNREADABLE)
        if event is not None:
            self._streams.feed([event])

    async def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end(_GRACE_S)

    def _send(
        self, header: dict[str, Any], payload: bytes | memoryview = b"", descriptor: int | None = None
    ) -> None:
        if self._child is None or not self._up.is_set():
            raise EngineUnavailable(ENGINE_DIED[1])
        try:
            self._child.post(header, payload, descriptor)
        except OSError:
            raise EngineUnavailable(ENGINE_DIED[1]) from None

    def _cancel(self, request_id: str) -> None:
        with contextlib.suppress(EngineUnavailable):
            self._send({"op": "cancel", "id": request_id})

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        self._streams.open(request.id)
        try:
            self._send({"op": "submit", "request": request_to_json(request)})
        except EngineUnavailable:
            self._streams.discard(request.id)
            raise
        async with contextlib.aclosing(self._streams.read(request.id, self._cancel)) as events:
            async for event in events:
                yield event

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        """Returns when the engine has them. Frames keep their order, so every wish that it uttered before
        was heard before, and the caller can tell a late wish from a new one."""
        asked = {"op": "tiles", "key": key, "grid": tiles.grid.numbers}
        if isinstance(tiles, SealedTiles):
            await self._ask(asked, descriptor=tiles.memory.descriptor)
        else:
            await self._ask(asked, await asyncio.to_thread(tiles.wire))

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        self._send({"op": "no_tiles", "key": key, "code": code, "message": message})

    async def _ask(
        self, message: dict[str, Any], payload: bytes | memoryview = b"", descriptor: int | None = None
    ) -> Any:
        """The child's reply, after the step under way. Raises EngineUnavailable once the child is gone."""
        reply = next(self._reply_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[reply] = future
        try:
            self._send({**message, "reply": reply}, payload, descriptor)
            return await future
        finally:
            self._replies.pop(reply, None)

    async def stats(self) -> dict[str, Any]:
        value: dict[str, Any] = await self._ask({"op": "stats"})
        return value

    async def clear_cache(self) -> None:
        await self._ask({"op": "clear"})
