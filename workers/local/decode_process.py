"""One decode process: `python -m workers.local.decode_process --fd N`. Frames in, frames out.

One image at a time.
It reads no file and opens no connection. Whatever an image does to it, the parent sees a closed socket,
starts another process and tries again.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from preprocess.formats.libtiff import prepare
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.types import ImageError, Tiles
from preprocess.wire import to_bytes, to_parts
from workers.children.frames import FrameSocket, frames_of_parent
from workers.children.process_limits import OUT_OF_MEMORY_EXIT, limit_cpu, limit_memory, unlimit_cpu
from workers.contract.sealed_memory import seal
from workers.local.background import Background


def serve(frames: FrameSocket, background: Background) -> None:
    """Until the parent closes its end; raises EOFError then."""
    frames.send({"op": "ready"})
    while True:
        header, data, _ = frames.receive()
        limit_cpu(int(header["cpu_s"]))
        try:
            if header["background"]:
                tiles = background.run(make_tiles, header, data)
            else:
                tiles = make_tiles(header, data)
            send(frames, tiles)
        except ImageError as error:
            frames.send({"op": "error", "code": error.code, "message": error.message})
        unlimit_cpu()


def make_tiles(header: dict[str, Any], data: bytes) -> Tiles:
    """Raises ImageError."""
    spec, limits = PreprocessSpec.from_json(header["spec"]), ImageLimits.from_json(header["limits"])
    return preprocess(data, spec, limits)


def send(frames: FrameSocket, tiles: Tiles) -> None:
    """As sealed memory where there is such a thing."""
    descriptor = seal(to_parts(tiles, is_sealed=True))
    if descriptor is None:
        frames.send({"op": "tiles"}, to_bytes(tiles))
        return
    try:
        frames.send({"op": "tiles"}, descriptor=descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    options = parser.parse_args()
    background = Background()
    prepare()
    limit_memory(spare_bytes=options.memory_bytes)
    try:
        with frames_of_parent(options.fd) as frames:
            serve(frames, background)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_EXIT)


if __name__ == "__main__":
    main()
