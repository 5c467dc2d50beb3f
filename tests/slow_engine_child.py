"""An engine process without weights, for test_progress.py: a layer of a tile for every byte on a socket."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence

import numpy as np
from fake_backend import EOS, ByteTokens, FakeBackend

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from llm.engine import Engine
from llm.engine_config import EngineConfig
from workers.local.engine_process import serve
from workers.local.engine_runner import EngineRunner
from workers.local.progress import Progress

LAYERS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layers")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    arguments = parser.parse_args()
    progress = Progress.of_file(arguments.progress_fd)
    layers = socket.socket(socket.AF_UNIX)
    layers.connect(arguments.layers)

    def encode(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        for _ in range(LAYERS * sum(len(tiles) for tiles in images)):
            layers.recv(1)
            progress.tick()
            layers.sendall(b".")
        return [np.ones((len(tiles), 2)) for tiles in images]

    batcher = TileBatcher(encode, VisualCache(1 << 20), num_rows=len, max_step_s=1e-9, concat=np.concatenate)
    runner = EngineRunner(
        batcher,
        lambda visuals: Engine(FakeBackend(), visuals, EngineConfig(), ByteTokens(), frozenset({EOS})),
    )
    with socket.socket(fileno=arguments.fd) as connection:
        serve(connection, runner, progress)


if __name__ == "__main__":
    main()
