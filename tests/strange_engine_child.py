"""An engine process on fakes, for test_supervision.py, whose words its parent does not all know.

strange_engine_child.py MODE MARK: `newer` speaks of things to come, `broken` leaves the frames' rhythm in its
first life (MARK is the file that says so), `unreadable` has lost the text of the tokens of r1 and r3.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from pathlib import Path
from typing import Any

from fake_runner import fake_runner

from workers.local.engine_process import FrameSocket, serve
from workers.local.progress import Progress


def newer(send: Any, frames: FrameSocket, header: dict[str, Any]) -> None:
    send(frames, {"op": "weather", "version": 99, "sky": "blue"})
    for event in header.get("events", ()):
        event |= {"mood": "good"}
        for name in ("usage", "timings"):
            if event.get(name):
                event[name] |= {"carbon": 1}
    if "events" in header:
        header["events"].insert(0, {"type": "Thought", "request_id": "r", "text": "hm"})
    send(frames, {**header, "version": 99, "tide": "low"})


def unreadable(send: Any, frames: FrameSocket, header: dict[str, Any]) -> None:
    for event in header.get("events", ()):
        if event["request_id"] in ("r1", "r3"):
            event.pop("text", None)
    send(frames, header)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("mark", type=Path)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    arguments = parser.parse_args()
    send = FrameSocket.send

    def broken(frames: FrameSocket, header: dict[str, Any], payload: bytes = b"") -> None:
        send(frames, header, payload)
        if "events" in header:
            arguments.mark.touch()
            frames._socket.sendall(b"\xff" * 64)

    strange = {"newer": newer, "unreadable": unreadable}.get(arguments.mode)
    if strange is not None:
        FrameSocket.send = lambda frames, header, payload=b"": strange(send, frames, header)  # type: ignore[method-assign]
    elif not arguments.mark.exists():
        FrameSocket.send = broken  # type: ignore[method-assign]
    with socket.socket(fileno=arguments.fd) as connection, contextlib.suppress(OSError):
        serve(connection, fake_runner(), Progress.of_file(arguments.progress_fd))


if __name__ == "__main__":
    main()
