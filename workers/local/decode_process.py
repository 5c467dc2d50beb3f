"""One decode process: `python -m workers.local.decode_process --fd N`. Frames in, frames out.

One image at a time.
It reads no file and opens no connection. Whatever an image does to it, the parent sees a closed socket,
starts another process and tries again.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from typing import Any

from preprocess.formats.libtiff import prepare
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.types import ImageError
from preprocess.wire import to_bytes
from workers.children.process_limits import OUT_OF_MEMORY_EXIT, limit_cpu, limit_memory, unlimit_cpu
from workers.contract.messages import FRAME_HEADER, frame_sizes, pack_frame
from workers.local.background import Background


def serve(connection: socket.socket, background: Background) -> None:
    """Until the parent closes its end."""
    send(connection, {"op": "ready"})
    while (frame := receive(connection)) is not None:
        header, data = frame
        limit_cpu(int(header["cpu_s"]))
        try:
            if header["background"]:
                payload = background.run(make_tiles, header, data)
            else:
                payload = make_tiles(header, data)
        except ImageError as error:
            send(connection, {"op": "error", "code": error.code, "message": error.message})
        else:
            send(connection, {"op": "tiles"}, payload)
        unlimit_cpu()


def make_tiles(header: dict[str, Any], data: bytes) -> bytes:
    """Tiles in wire format. Raises ImageError."""
    spec, limits = PreprocessSpec.from_json(header["spec"]), ImageLimits.from_json(header["limits"])
    return to_bytes(preprocess(data, spec, limits, int(header["page"])))


def send(connection: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    for part in pack_frame(header, payload):
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """None at the end of the stream."""
    sizes = _read(connection, FRAME_HEADER.size)
    if sizes is None:
        return None
    json_bytes, payload_bytes = frame_sizes(sizes)
    text, payload = _read(connection, json_bytes), _read(connection, payload_bytes)
    if text is None or payload is None:
        return None
    return json.loads(text), payload


def _read(connection: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(buffer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    background = Background()
    prepare()
    limit_memory(spare_bytes=options.memory_bytes)
    try:
        with socket.socket(fileno=options.fd) as connection:
            serve(connection, background)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_EXIT)
    except (BrokenPipeError, ConnectionResetError):
        pass


if __name__ == "__main__":
    main()
