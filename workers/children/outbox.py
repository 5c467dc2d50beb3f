"""What is to go through a non-blocking socket, in order, with descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque


class Outbox:
    """Sends at once what the socket takes, and the rest from the event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._parts: deque[tuple[memoryview, int | None]] = deque()
        self._waiting: list[asyncio.Future[None]] = []  # for it to be empty
        self._loop: asyncio.AbstractEventLoop | None = None  # which watches the socket for us
        self._is_broken = False

    def put(self, parts: list[bytes | memoryview], descriptor: int | None = None) -> None:
        """A copy of `descriptor` goes with the first part. Raises BrokenPipeError where nobody reads."""
        if self._is_broken:
            raise BrokenPipeError
        for part in parts:
            if part:
                copy = None if descriptor is None else os.dup(descriptor)
                self._parts.append((memoryview(part), copy))
                descriptor = None
        if self._loop is None:
            self._flush()
            if self._is_broken:
                raise BrokenPipeError

    async def flushed(self) -> None:
        """Raises BrokenPipeError where not all could be sent."""
        if self._parts:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        if self._is_broken:
            raise BrokenPipeError

    def close(self) -> None:
        """Drops what was not sent."""
        self._is_broken = True
        for _, descriptor in self._parts:
            if descriptor is not None:
                os.close(descriptor)
        self._parts.clear()
        self._settle()

    def _flush(self) -> None:
        try:
            while self._parts:
                self._send_some()
        except (BlockingIOError, InterruptedError):
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self.close()
        else:
            self._settle()

    def _send_some(self) -> None:
        part, descriptor = self._parts[0]
        if descriptor is None:
            sent = self._socket.send(part)
        else:
            sent = socket.send_fds(self._socket, [part], [descriptor])
            os.close(descriptor)
        if sent == len(part):
            self._parts.popleft()
        else:
            self._parts[0] = (part[sent:], None)

    def _settle(self) -> None:
        if self._loop is not None:
            self._loop.remove_writer(self._socket)
            self._loop = None
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
