"""A way to Redis that a test may cut and mend: the server lives, one process can't reach it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class RedisProxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._thread.start()
        self.mend()

    def close(self) -> None:
        self.refuse()

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # for transports to close their sockets

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def silence(self) -> None:
        """Connections stay open, and nothing comes through."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def refuse(self) -> None:
        """Connections break, and new ones are refused."""

        async def refuse() -> None:
            if self._server is not None:
                self._server.close()
                self._server = None
            for writer in list(self._writers):
                writer.transport.abort()
            while self._writers:
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(refuse(), self._loop).result(20)

    def mend(self) -> None:
        async def mend() -> None:
            self._open.set()
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
                self.port = self._server.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(mend(), self._loop).result(20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = {writer}
        self._writers.add(writer)
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
            mine.add(there[1])
            self._writers.add(there[1])
            pumps = [
                asyncio.create_task(self._pump(*ends)) for ends in ((reader, there[1]), (there[0], writer))
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in mine:
                end.transport.abort()
            self._writers -= mine

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()


@contextlib.contextmanager
def redis_proxy(port: int) -> Iterator[RedisProxy]:
    proxy = RedisProxy(port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
