"""A child's end of the socket to its parent: frames, and descriptors that come with them."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from workers.contract.messages import FRAME_HEADER, frame_sizes, pack_frame


class Frame(NamedTuple):
    header: dict[str, Any]
    payload: bytes
    descriptor: int | None  # the reader closes it


class FrameSocket:
    """Blocking, for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def receive(self) -> Frame:
        """The next frame. Raises EOFError at the end of the stream."""
        sizes, descriptors, _, _ = socket.recv_fds(self._socket, FRAME_HEADER.size, 1)
        if not sizes:
            raise EOFError
        json_bytes, payload_bytes = frame_sizes(sizes + self._read(FRAME_HEADER.size - len(sizes)))
        header: dict[str, Any] = json.loads(self._read(json_bytes))
        return Frame(header, self._read(payload_bytes), descriptors[0] if descriptors else None)

    def send(self, header: dict[str, Any], payload: bytes = b"", descriptor: int | None = None) -> None:
        """The descriptor stays the caller's."""
        first, rest = pack_frame(header, payload)
        if descriptor is not None:
            first = memoryview(first)[socket.send_fds(self._socket, [first], [descriptor]) :]
        self._socket.sendall(first)
        self._socket.sendall(rest)

    def _read(self, count: int) -> bytes:
        """In one piece, as the kernel gives it, unless a signal comes between."""
        data = self._socket.recv(count, socket.MSG_WAITALL) if count else b""
        while len(data) < count:
            more = self._socket.recv(count - len(data), socket.MSG_WAITALL)
            if not more:
                raise EOFError
            data += more
        return data


@contextlib.contextmanager
def frames_of_parent(fd: int) -> Iterator[FrameSocket]:
    """The child's frames, on the descriptor that it was given. The block ends when the parent closes its end.

    Ctrl-C reaches the whole group: the parent decides.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
        socket.socket(fileno=fd) as connection,
    ):
        yield FrameSocket(connection)
