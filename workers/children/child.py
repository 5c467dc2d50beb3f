"""Child processes of ours: how each is started, spoken with and ended. What the kernel grants it is in
`workers.children.process_limits`, its own end of the socket in `workers.children.frames`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.children.frames import Frame
from workers.children.outbox import Outbox
from workers.contract.messages import FRAME_HEADER, MAX_PAYLOAD_BYTES, frame_sizes, pack_frame

_ROOT = str(Path(__file__).resolve().parent.parent.parent)
_LOOK_S = 0.05

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def module_command(module: str) -> list[str]:
    """Runs one of our modules. -P: a `json.py` in the working folder is a stranger's file and no module."""
    return [sys.executable, "-P", "-m", module]


def child_environment(**variables: str) -> dict[str, str]:
    """The parent's, with our packages importable wherever the parent found them."""
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}


class Child:
    """A process and the socket to it, which carries frames (`workers.contract.messages`) both ways.

    It ends with its parent, at the latest when it finds its socket closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        is_quiet: bool = False,
        is_blocking: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` gets `--fd N` appended. is_quiet: what it prints is dropped. is_blocking: `socket` is,
        and `send` and `receive` can't be used. environment: beside the parent's. Raises OSError."""
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(is_blocking)
        self._outbox = Outbox(self.socket)
        output = subprocess.DEVNULL if is_quiet else None
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), *pass_fds],
                process_group=0,  # Ctrl-C would reach it before it ignores it
                env=child_environment(**(environment or {})),
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Minus a signal's number for one that it ended by; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        while (status := self.exit_status) is None:
            await asyncio.sleep(_LOOK_S)
        return status

    def post(
        self, header: dict[str, Any], payload: bytes | memoryview = b"", descriptor: int | None = None
    ) -> None:
        """Sends what the socket takes now, and the rest when it can, in order. `descriptor` stays the
        caller's. Raises OSError when it is gone."""
        self._outbox.put(pack_frame(header, payload), descriptor)

    async def send(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        """Returns when all is sent. Raises OSError when it is gone."""
        self.post(header, payload)
        await self._outbox.flushed()

    async def receive(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame:
        """Raises EOFError or OSError when it is gone, ValueError for what is no frame."""
        first, descriptor = await self._first()
        try:
            sizes = first + await self._read(FRAME_HEADER.size - len(first))
            json_bytes, payload_bytes = frame_sizes(bytes(sizes))
            header = json.loads(await self._read(json_bytes))
            if not isinstance(header, dict) or payload_bytes > max_payload_bytes:
                raise ValueError("not a frame of this child's")
            # a bytearray does for bytes, and spares a copy of what may be megabytes
            payload: Any = await self._read(payload_bytes)
            return Frame(header, payload, descriptor)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    async def end(self, grace_s: float = 0.0) -> None:
        """Kills it, unless it ends by itself within `grace_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.ended()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._outbox.close()
        self.socket.close()

    def kill(self) -> None:
        """At once; `end` for those who have no event loop."""
        self.socket.close()
        self._process.kill()
        self._process.wait()

    async def _first(self) -> tuple[bytes, int | None]:
        """The first bytes of a frame, and the descriptor that came with them."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, FRAME_HEADER.size, 1)
            except BlockingIOError:
                await self._readable()
                continue
            if not data:
                raise EOFError
            return data, descriptors[0] if descriptors else None

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self.socket, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self.socket)

    async def _read(self, count: int) -> bytearray:
        loop = asyncio.get_running_loop()
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            received = await loop.sock_recv_into(self.socket, view)
            if not received:
                raise EOFError
            view = view[received:]
        return buffer


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
