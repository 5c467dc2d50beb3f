"""The engine inside this process, stepped on a thread: for one-off commands and tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llm.request import Event, Request, VisualKey
from workers.contract.engine_client import ENGINE_DIED, SHUTTING_DOWN, EngineUnavailable
from workers.contract.streams import StreamTable, end_tasks
from workers.contract.tiles_handle import TilesHandle
from workers.local.engine_runner import EngineRunner

log = logging.getLogger(__name__)


class LocalEngine:
    """`EngineClient` over a runner of this process. The runner is only ever touched on one thread."""

    def __init__(self, make_runner: Callable[[], EngineRunner]) -> None:
        self._make_runner = make_runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._streams = StreamTable()
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._runner: EngineRunner | None = None
        self.info: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        return self._loop is not None and not self._loop.done()

    async def start(self) -> None:
        self._runner = await self._call(self._make_runner)
        self.info = self._runner.info()
        self._loop = asyncio.create_task(self._run(self._runner))

    async def close(self) -> None:
        if self._loop:
            await end_tasks(self._loop)
            self._loop = None
        self._streams.fail_all(*SHUTTING_DOWN)
        self._thread.shutdown()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _run(self, runner: EngineRunner) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while runner.has_work:
                    self._streams.feed(await self._call(runner.step))
        except Exception:
            log.exception("the engine failed, for good")
            self._streams.fail_all(*ENGINE_DIED)

    async def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        await self._call(function, *arguments)
        self._work.set()

    def _live_runner(self) -> EngineRunner:
        if self._runner is None or not self.ready:
            raise EngineUnavailable("the engine is not running")
        return self._runner

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        runner = self._live_runner()
        self._streams.open(request.id)
        try:
            await self._tell(runner.submit, request)
        except BaseException:
            self._streams.discard(request.id)
            self._cancel(request.id)  # the thread may have taken the request when its caller left
            raise
        async with contextlib.aclosing(self._streams.read(request.id, self._cancel)) as events:
            async for event in events:
                yield event

    def _cancel(self, request_id: str) -> None:
        if self._runner is not None:
            with contextlib.suppress(RuntimeError):  # the thread is gone: so is the request
                self._thread.submit(self._runner.cancel, request_id)

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        opened = await asyncio.to_thread(tiles.open)
        await self._tell(self._live_runner().put_tiles, key, opened)

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        await self._tell(self._live_runner().fail_tiles, key, code, message)

    async def stats(self) -> dict[str, Any]:
        value: dict[str, Any] = await self._call(self._live_runner().stats)
        return value

    async def clear_cache(self) -> None:
        await self._call(self._live_runner().clear_cache)
