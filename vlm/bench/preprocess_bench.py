"""Preprocessing beside transformers' better processor, and images per second with one and two workers.

Ratios are CPU seconds of one thread, taken in turn in this process. Both sides start from the bytes of a
12-megapixel JPEG and end with normalised float32 tiles.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from PIL import Image, ImageDraw
from PIL import __version__ as pil_version

from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.tiling import Idefics3Tiling
from vlm.bench.harness.image_path import image_path
from vlm.bench.harness.results import report, result, say, spread, timed, tree_cpu_seconds
from workers.cluster.celery_app import make_app
from workers.cluster.node.preprocess_celery import CeleryPreprocess
from workers.contract.stages import DecodeLimits, PreprocessStage
from workers.local.preprocess_pool import DecodeProcess, LocalPreprocess

WIDTH, HEIGHT = 4000, 3000
TILE_SIZE = 512
DEADLINE_S = 300.0


def run(quick: bool = False) -> dict[str, Any]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        photo = make_photo(0)
        results: dict[str, dict[str, Any]] = {}
        for edge in (1536, 2048):
            say(f"preprocess: beside transformers, longest edge {edge}")
            results.update(over_transformers(photo, edge, rounds=3 if quick else 9))
    finally:
        torch.set_num_threads(threads)
    say("preprocess: the way of an image")
    results.update(image_path(rounds=3 if quick else 9))
    say("preprocess: local processes")
    results.update(local_workers(num_images=8 if quick else 40))
    if shutil.which("redis-server"):
        say("preprocess: Celery workers")
        results.update(celery_workers(num_images=8 if quick else 40))
    else:
        for count in (1, 2):
            results[_rate_name(count)] = results["local_" + _rate_name(count)]
    return report("preprocess", results)


def make_photo(seed: int) -> bytes:
    """A page of text under uneven light with sensor noise, as a JPEG of 12 megapixels."""
    rng = np.random.default_rng(seed)
    light = Image.fromarray(rng.integers(150, 256, (6, 8, 3), np.uint8))
    page = light.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(page)
    for line, top in enumerate(range(100, HEIGHT - 100, 70)):
        draw.text(
            (120, top), f"{seed} {line:02} Invoice total 1234.56 EUR, thank you " * 4, "black", font_size=44
        )
    noise = rng.integers(-6, 7, (HEIGHT, WIDTH, 1), np.int16)
    pixels = np.clip(np.asarray(page, np.int16) + noise, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def over_transformers(photo: bytes, edge: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Both variants against the faster of transformers' two processors."""
    specs = {name: _spec(edge, name) for name in ("fast", "exact")}
    opponents = _opponents(edge)
    contenders: dict[str, Callable[[], np.ndarray]] = {
        **{name: lambda s=spec: _normalised(photo, s) for name, spec in specs.items()},  # type: ignore[misc]
        **{name: lambda p=processor: _theirs(photo, p) for name, processor in opponents.items()},  # type: ignore[misc]
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, call in contenders.items():
            _, _, cpu_s = timed(call)
            if round_:
                seconds[name].append(cpu_s)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(opponents, key=lambda name: median[name])
    tiles = {name: preprocess(photo, spec) for name, spec in specs.items()}
    reference = contenders["transformers_pil"]()
    common: dict[str, Any] = {
        "image": f"{WIDTH}x{HEIGHT} JPEG, {len(photo) / 1e6:.1f} MB",
        "tiles": tiles["fast"].grid.num_tiles,
        "threads": 1,
        "pil": pil_version,
        "opponent": best,
        **{f"{name}_ms": round(value * 1e3, 1) for name, value in median.items()},
    }
    results = {}
    for name in specs:
        distance = np.abs((tiles[name].pixels / 127.5 - 1.0) - reference) * 127.5
        label = f"over_transformers_12mp_{edge}"
        results[label if name == "fast" else f"exact_{label}"] = result(
            median[best] / median[name],
            "times",
            variant=name,
            mean_distance_of_255=round(float(distance.mean()), 3),
            p99_distance_of_255=round(float(np.percentile(distance, 99)), 1),
            max_distance_of_255=round(float(distance.max()), 1),
            spread=spread(seconds[name]),
            **common,
        )
    return results


def local_workers(num_images: int) -> dict[str, dict[str, Any]]:
    """The pool of decode processes that a server has of its own."""
    results = {
        "local_" + _rate_name(count): _rate(LocalPreprocess(count), num_images, count, "local processes")
        for count in (1, 2)
    }

    async def start_and_weigh() -> tuple[float, float, float]:
        started = time.perf_counter()
        process = DecodeProcess(DecodeLimits().memory_bytes)
        await process.ready()
        start_s = time.perf_counter() - started
        child = psutil.Process(process.pid)
        cpu_s, memory_mb = sum(child.cpu_times()[:2]), child.memory_full_info().uss / 2**20
        await process.kill()
        return start_s, cpu_s, memory_mb

    start_s, cpu_s, memory_mb = asyncio.run(start_and_weigh())
    results["decode_process_start_s"] = result(start_s, "s", cpu_s=round(cpu_s, 2))
    results["decode_process_memory_mb"] = result(memory_mb, "MiB", what="unique set size when idle")
    return results


def celery_workers(num_images: int) -> dict[str, dict[str, Any]]:
    """`vlm worker preprocess` over a redis-server that this function starts."""
    results: dict[str, dict[str, Any]] = {}
    with _redis() as url:
        for count in (1, 2):
            started = time.perf_counter()
            with _celery_worker(url, count) as process:
                start_s = time.perf_counter() - started
                if count == 1:
                    family = [process, *process.children(recursive=True)]
                    memory_mb = sum(p.memory_full_info().uss for p in family) / 2**20
                    cpu_s = sum(sum(p.cpu_times()[:2]) for p in family)
                    results["worker_start_s"] = result(
                        start_s, "s", cpu_s=round(cpu_s, 2), what="until it answers a ping"
                    )
                    results["worker_memory_mb"] = result(
                        memory_mb, "MiB", what="unique set sizes of parent and one child, idle"
                    )
                stage = CeleryPreprocess(url, url)
                results[_rate_name(count)] = _rate(stage, num_images, count, "Celery worker")
    return results


def _rate(stage: PreprocessStage, num_images: int, workers: int, pool: str) -> dict[str, Any]:
    """Images per second of wall time, all of them asked for at once, each a file of its own."""
    photos = [make_photo(seed) for seed in range(4)]
    # bytes after the end of a JPEG change its digest and not its pixels
    files = [photos[index % 4] + index.to_bytes(4, "big") for index in range(num_images + 2 * workers)]
    spec = _spec(2048, "fast")
    limits = ImageLimits()

    async def ask(file: bytes) -> None:
        (await stage.tiles(file, probe(file), spec, limits, deadline_s=DEADLINE_S)).close()

    async def measure() -> tuple[float, float]:
        await stage.start()
        try:
            warm, measured = files[num_images:], files[:num_images]
            await asyncio.gather(*(ask(file) for file in warm))
            wall, cpu = time.perf_counter(), tree_cpu_seconds()
            await asyncio.gather(*(ask(file) for file in measured))
            return time.perf_counter() - wall, tree_cpu_seconds() - cpu
        finally:
            await stage.close()

    wall_s, cpu_s = asyncio.run(measure())
    return result(
        num_images / wall_s,
        "images/s",
        image=f"{WIDTH}x{HEIGHT} JPEG",
        longest_edge=2048,
        workers=workers,
        pool=pool,
        cpu_s_per_image=round(cpu_s / num_images, 4),
        n=num_images,
    )


def _rate_name(workers: int) -> str:
    return f"images_per_s_{workers}_worker{'s' if workers > 1 else ''}"


def _spec(edge: int, variant: Any) -> PreprocessSpec:
    return PreprocessSpec(Idefics3Tiling(TILE_SIZE, edge), variant=variant)


def _normalised(photo: bytes, spec: PreprocessSpec) -> Any:
    import torch

    return torch.from_numpy(preprocess(photo, spec).pixels).float().mul_(1 / 127.5).sub_(1.0)


def _opponents(edge: int) -> dict[str, Any]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor

    config: dict[str, Any] = {
        "size": {"longest_edge": edge},
        "max_image_size": {"longest_edge": TILE_SIZE},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return {
        "transformers_pil": SmolVLMImageProcessorPil(**config),
        "transformers_torchvision": SmolVLMImageProcessor(**config),
    }


def _theirs(photo: bytes, processor: Any) -> np.ndarray:
    """[num_tiles, H, W, 3]"""
    image = Image.open(io.BytesIO(photo)).convert("RGB")
    return np.moveaxis(np.asarray(processor(image, return_tensors="pt")["pixel_values"][0]), 1, -1)


@contextmanager
def _redis() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as directory:
        command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", directory]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for_port(int(port))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait(20)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def _celery_worker(url: str, concurrency: int) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "vlm.cli.main", "worker", "preprocess", "--broker", url]
    worker = subprocess.Popen([*command, "--concurrency", str(concurrency)])
    try:
        with make_app(url) as app:
            deadline = time.monotonic() + 60
            while not app.control.ping(timeout=0.05):
                if worker.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the preprocess worker did not start")
        yield psutil.Process(worker.pid)
    finally:
        worker.terminate()
        worker.wait(30)
