"""What an image costs a server besides decoding and encoding it: CPU time of all processes of one machine.

`python -m vlm.bench.harness.image_path --fd N --progress-fd N` is the engine of this measurement: it takes
tiles and does nothing with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import socket
import statistics
from typing import Any

import numpy as np
import psutil
from PIL import Image

from llm.request import Event, Request, VisualKey
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.tiling import Idefics3Tiling
from preprocess.types import Tiles
from vlm.bench.harness.results import result, spread, timed
from workers.children.child import module_command
from workers.local.engine_process import EngineProcess, serve
from workers.local.preprocess_pool import LocalPreprocess
from workers.local.progress import Progress

WIDTH, HEIGHT = 2048, 1536
SPEC = PreprocessSpec(Idefics3Tiling(tile_size=512, longest_edge=2048))
IMAGES = 12  # of a round


class Sink:
    """`Runner` that drops what it gets."""

    has_work = False

    def info(self) -> dict[str, Any]:
        return {}

    def submit(self, request: Request) -> None:
        return

    def cancel(self, request_id: str) -> None:
        return

    def put_tiles(self, key: VisualKey, tiles: Tiles) -> None:
        return

    def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        return

    def step(self) -> list[Event]:
        return []

    def stats(self) -> dict[str, Any]:
        return {}

    def clear_cache(self) -> None:
        return


def image_path(rounds: int = 9) -> dict[str, dict[str, Any]]:
    """From a file's bytes to the engine's `put_tiles`, of 13 tiles, less decoding and cutting themselves."""
    file = _photo()
    outside = asyncio.run(_measure(file, rounds))
    tiles = preprocess(file, SPEC)
    return {
        "image_path_cpu_ms_outside_decode": result(
            statistics.median(outside),
            "ms",
            spread=spread(outside),
            image=f"{WIDTH}x{HEIGHT} JPEG",
            tiles=tiles.grid.num_tiles,
            megabytes=round(tiles.pixels.nbytes / 1e6, 1),
            images=rounds * IMAGES,
        )
    }


async def _measure(file: bytes, rounds: int) -> list[float]:
    """Milliseconds an image, by round."""
    stage = LocalPreprocess(1)
    engine = EngineProcess(module_command("vlm.bench.harness.image_path"))
    limits = ImageLimits()
    await asyncio.gather(stage.start(), engine.start())
    outside = []
    try:
        pids = [psutil.Process().pid, *stage.pids, engine.pid]
        for round_ in range(rounds + 1):
            before = _cpu_s(pids)
            for number in range(IMAGES):
                info = probe(file, limits)
                tiles = await stage.tiles(file, info, SPEC, limits, deadline_s=60)
                with contextlib.closing(tiles):
                    await engine.put_tiles(VisualKey(f"{number}"), tiles)
            spent = _cpu_s(pids) - before
            _, _, decode_s = timed(lambda: [preprocess(file, SPEC, limits) for _ in range(IMAGES)])
            if round_:
                outside.append((spent - decode_s) / IMAGES * 1e3)
    finally:
        await asyncio.gather(stage.close(), engine.close())
    return outside


def _cpu_s(pids: list[int | None]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _photo() -> bytes:
    """Smooth, so that decoding it takes little beside the rest."""
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    options = parser.parse_args()
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, Sink(), Progress.of_file(options.progress_fd))


if __name__ == "__main__":
    main()
