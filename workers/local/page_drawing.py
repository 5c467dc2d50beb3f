"""PDF pages as images, drawn in processes that may hang or die without taking the run with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import asdict
from typing import Any

from preprocess.pages import DrawnPage, PageLimits
from preprocess.types import ImageError
from workers.children.child import ONE_THREAD, Child, module_command

_START_TIMEOUT_S = 60.0
_MAX_PAGE_BYTES = 256 << 20


def command(limits: PageLimits) -> list[str]:
    """The command line of a drawing process."""
    return [*module_command("workers.children.page_process"), "--limits", json.dumps(asdict(limits))]


class _Crashed(Exception):
    def __init__(self, out_of_time: bool) -> None:
        super().__init__()
        self.out_of_time = out_of_time


class _Drawer:
    """One child process; asked one thing at a time."""

    def __init__(self, limits: PageLimits) -> None:
        self._limits = limits
        self._child: Child | None = None
        self.path = ""  # the document it holds open

    async def _start(self) -> Child:
        self._child = Child(command(self._limits), is_quiet=True, environment=ONE_THREAD)
        async with asyncio.timeout(_START_TIMEOUT_S):
            await self._child.receive()
        return self._child

    async def ask(self, path: str, page: int | None) -> tuple[dict[str, Any], bytes]:
        """Raises `_Crashed` when the process died or was too slow; the next call starts another one."""
        try:
            child = self._child or await self._start()
            self.path = path
            async with asyncio.timeout(self._limits.page_deadline_s):
                await child.send({"page": page}, os.fsencode(path))
                answer = await child.receive(_MAX_PAGE_BYTES)
                return answer.header, bytes(answer.payload)
        except (TimeoutError, ConnectionError, EOFError, ValueError) as error:
            out_of_time = isinstance(error, TimeoutError) or await self._died_of_time()
            await self.close()
            raise _Crashed(out_of_time) from None
        except BaseException:  # cancelled in the middle of an exchange: the socket is out of step
            await self.close()
            raise

    async def _died_of_time(self) -> bool:
        if self._child is None:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await self._child.ended() == -signal.SIGXCPU
        return False

    async def close(self) -> None:
        child, self._child, self.path = self._child, None, ""
        if child is not None:
            await child.end()


class PageRenderer:
    """A few drawing processes, started when first needed. Errors are `ImageError` with fixed texts."""

    def __init__(self, limits: PageLimits | None = None, num_processes: int = 1) -> None:
        self.limits = limits or PageLimits()
        self._idle = [_Drawer(self.limits) for _ in range(num_processes)]
        self._free = asyncio.Semaphore(num_processes)

    async def count(self, path: str) -> int:
        """Pages of a PDF.

        Raises ImageError `invalid_pdf`, `encrypted_pdf`, `too_many_pages`, `page_timeout`, `page_crashed`.
        """
        header, _ = await self._ask(path, None)
        return int(header["count"])

    async def render(self, path: str, page: int) -> DrawnPage:
        """Page `page` (from 0), drawn. Raises ImageError as `count` does, and `invalid_page`."""
        header, png = await self._ask(path, page)
        return DrawnPage(png, bool(header["lacks_text"]))

    async def _ask(self, path: str, page: int | None) -> tuple[dict[str, Any], bytes]:
        async with self._free:
            worker = next((w for w in self._idle if w.path == path), self._idle[-1])
            self._idle.remove(worker)
            try:
                header, payload = await worker.ask(path, page)
            except _Crashed as crash:
                if crash.out_of_time:
                    raise ImageError("page_timeout", "The page took too long to draw.") from None
                raise ImageError("page_crashed", "The page could not be drawn.") from None
            finally:
                self._idle.append(worker)
        if "code" in header:
            raise ImageError(header["code"], header["message"])
        return header, payload

    async def close(self) -> None:
        for worker in self._idle:
            await worker.close()
