"""`vlm bench cluster`: questions routed to the replica that holds their image, beside random routing.

Real processes over a real Redis on this machine. Both policies meet the same arrivals, images by Zipf
popularity: a third replica joins after a third of the questions, one of the first leaves after two thirds.
Each policy plays four times, in the order ABBA, so that a machine whose load drifts favours neither; first
tokens are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm.request import SamplingParams
from vlm.bench.harness.engine_load import document
from vlm.bench.harness.results import report, result, say, spread
from vlm.build import engine_command
from vlm.cli.errors import CommandError
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from vlm.spec import BLOCK_SIZE, ModelSpec
from workers.cluster.node.remote_engine import RemoteEngine, Router
from workers.cluster.redis_client import connect
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_inline import InlinePreprocess

OPTIONS = EngineOptions(kv_cache_mb=64)
NUM_IMAGES = 20
LOAD = 0.8  # of the measured capacity
ZIPF = 1.0
MAX_TOKENS = 64
ROUNDS = 2 * ("routed", "random", "random", "routed")
_START_S = 120.0


@dataclass(frozen=True)
class ImageArrival:
    at_s: float
    image: int


@dataclass(frozen=True)
class Asked:
    image: int
    prefix_tokens: int  # up to the image's end, in whole blocks
    cached_tokens: int
    ttft_ms: float


class Fleet:
    """A redis-server and generate workers, each a process."""

    def __init__(self, directory: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        self._redis = self._spawn(
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory
        )
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def add(self, name: str) -> None:
        command = (sys.executable, "-m", "vlm.cli.main", "worker", "generate", "--broker", self.url)
        options = ("--name", name, "--kv-cache-mb", str(OPTIONS.kv_cache_mb))
        self._workers[name] = self._spawn(*command, *options)

    def pause(self, name: str) -> None:
        self._workers[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._workers[name].send_signal(signal.SIGCONT)

    def leave(self, name: str) -> None:
        self._workers[name].terminate()

    def close(self) -> None:
        for process in (*self._workers.values(), self._redis):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    if shutil.which("redis-server") is None:
        raise CommandError("bench cluster needs redis-server on the PATH")
    with tempfile.TemporaryDirectory() as directory:
        made = Fleet(directory)
        try:
            yield made
        finally:
            made.close()


@contextlib.asynccontextmanager
async def node(
    spec: ModelSpec, url: str, router: Router | None
) -> AsyncIterator[tuple[Pipeline, RemoteEngine]]:
    engine = RemoteEngine(url, url, revision=spec.revision, router=router)
    pipeline = Pipeline(spec, InlinePreprocess(), engine)
    await pipeline.start()
    try:
        yield pipeline, engine
    finally:
        await pipeline.close()


async def until_alive(engine: RemoteEngine, names: set[str]) -> None:
    async with asyncio.timeout(_START_S):
        while set(engine.info["replicas"]) != names:
            await asyncio.sleep(0.1)


async def ask(pipeline: Pipeline, name: str, image: int, data: bytes) -> Asked:
    """A question of its own, so that nothing but the image's prefix can be found again."""
    message = ChatMessage("user", (ImageInput(data), f"Question {name}: what is in the image?"))
    prepared = pipeline.prepare(name, [message], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    span = prepared.prompt.spans[-1]
    answer = await pipeline.answer(prepared)
    prefix = (span.start + span.length) // BLOCK_SIZE * BLOCK_SIZE
    return Asked(image, prefix, min(prefix, answer.usage.cached_tokens), answer.timings.ttft_ms)


def arrivals(count: int, rate: float, seed: int) -> list[ImageArrival]:
    draw = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, NUM_IMAGES + 1) ** ZIPF
    images = draw.choice(NUM_IMAGES, size=count, p=weights / weights.sum())
    times = np.cumsum(draw.exponential(1.0 / rate, size=count))
    return [ImageArrival(float(at), int(image)) for at, image in zip(times, images, strict=True)]


async def capacity(pipeline: Pipeline, images: list[bytes], count: int) -> float:
    """Questions per second in a closed loop of eight, images known."""
    numbers = iter(range(count))
    await asyncio.gather(*(ask(pipeline, f"w{i}", i, data) for i, data in enumerate(images)))
    started = time.monotonic()

    async def client() -> None:
        for number in numbers:
            await ask(pipeline, f"c{number}", number % len(images), images[number % len(images)])

    await asyncio.gather(*(client() for _ in range(8)))
    return count / (time.monotonic() - started)


async def play(
    pipeline: Pipeline, cluster: Fleet, plan: list[ImageArrival], images: list[bytes], joins: str, leaves: str
) -> list[Asked]:
    """Open loop: questions come when they come, whatever the queues are like."""
    started = time.monotonic()
    asked = []
    for number, arrival in enumerate(plan):
        if number == len(plan) // 3:
            cluster.resume(joins)
        if number == 2 * len(plan) // 3:
            cluster.leave(leaves)
        await asyncio.sleep(max(0.0, started + arrival.at_s - time.monotonic()))
        asked.append(asyncio.create_task(ask(pipeline, f"q{number}", arrival.image, images[arrival.image])))
    return list(await asyncio.gather(*asked))


def hit_fraction(answers: list[Asked]) -> float:
    """Prefix tokens found, of those that one replica with all the images would have found."""
    seen: set[int] = set()
    found = possible = 0
    for answer in answers:
        if answer.image in seen:
            found += answer.cached_tokens
            possible += answer.prefix_tokens
        seen.add(answer.image)
    return found / possible


async def routing(
    spec: ModelSpec, cluster: Fleet, count: int, plays: tuple[str, ...] = ROUNDS
) -> dict[str, dict[str, Any]]:
    draw = random.Random(0)
    policies: dict[str, Router | None] = {
        "routed": None,
        "random": lambda key, loads: draw.choice(sorted(loads)),
    }
    images = [document(seed) for seed in range(NUM_IMAGES)]
    played: dict[str, list[list[Asked]]] = {policy: [] for policy in policies}
    rate = 0.0
    members = ["r0", "r1", "r2"]
    for name in members[:2]:
        cluster.add(name)
    for round_number, policy in enumerate(plays):
        staying, joins = members[round_number : round_number + 2], f"r{round_number + 2}"
        cluster.add(joins)
        async with node(spec, cluster.url, policies[policy]) as (pipeline, engine):
            await until_alive(engine, {*staying, joins})
            cluster.pause(joins)
            await until_alive(engine, set(staying))
            if not rate:
                rate = LOAD * await capacity(pipeline, images, max(24, count // 4))
            await engine.clear_cache()
            forget_level_2(cluster.url)
            await asyncio.sleep(1.0)
            answers = await play(
                pipeline, cluster, arrivals(count, rate, 1), images, joins, leaves=staying[0]
            )
            await until_alive(engine, {staying[1], joins})
        members = [f"r{number}" for number in range(round_number + 4)]
        played[policy].append(answers)
    about = {"model": spec.name, "questions": count, "images": NUM_IMAGES, "rate_per_s": round(rate, 2)}
    about |= {"replicas": "2, one joins, one leaves", "load": LOAD, "rounds": len(plays) // len(policies)}
    results: dict[str, dict[str, Any]] = {}
    for policy, rounds in played.items():
        hits = [hit_fraction(answers) for answers in rounds]
        ttfts = [sorted(answer.ttft_ms for answer in answers) for answers in rounds]
        p50s = [statistics.median(ttft) for ttft in ttfts]
        p95s = [ttft[int(0.95 * len(ttft))] for ttft in ttfts]
        results[f"{policy}_prefix_hit_fraction"] = result(
            statistics.mean(hits), "fraction", spread=spread(hits), **about
        )
        results[f"{policy}_ttft_p50_ms"] = result(statistics.median(p50s), "ms", spread=spread(p50s), **about)
        results[f"{policy}_ttft_p95_ms"] = result(statistics.median(p95s), "ms", spread=spread(p95s), **about)
    return results


def forget_level_2(url: str) -> None:
    client = connect(url)
    for name in client.scan_iter("vlm:visual*"):
        client.delete(name)
    client.close()


async def overhead(spec: ModelSpec, url: str, rounds: int) -> dict[str, dict[str, Any]]:
    """TTFT through queue and stream over that of an engine process beside this one, asked in turn."""
    data = document(0)
    beside = Pipeline(spec, InlinePreprocess(), EngineProcess(engine_command(OPTIONS)))
    await beside.start()
    try:
        async with node(spec, url, None) as (pipeline, engine):
            async with asyncio.timeout(_START_S):
                while not engine.ready:
                    await asyncio.sleep(0.1)
            pairs = []
            for number in range(rounds + 3):
                far = await ask(pipeline, f"far{number}", 0, data)
                near = await ask(beside, f"near{number}", 0, data)
                pairs.append((far.ttft_ms, near.ttft_ms))
    finally:
        await beside.close()
    warm = pairs[3:]
    differences = [far - near for far, near in warm]
    name = "queue_ttft_overhead_p50_ms"
    return {
        name: result(
            statistics.median(differences),
            "ms",
            model=spec.name,
            rounds=rounds,
            remote_p50_ms=statistics.median(far for far, _ in warm),
            engine_process_p50_ms=statistics.median(near for _, near in warm),
            spread=spread(differences),
        )
    }


def run(quick: bool = False) -> dict[str, Any]:
    spec = ModelSpec.load("default")
    results: dict[str, dict[str, Any]] = {}
    with fleet() as cluster:
        rounds = ROUNDS[:2] if quick else ROUNDS
        say(f"cluster: {len(rounds)} rounds of routed and random requests")
        results |= asyncio.run(routing(spec, cluster, 60 if quick else 200, rounds))
        say("cluster: first tokens with and without the queue")
        results |= asyncio.run(overhead(spec, cluster.url, 20 if quick else 60))
    return report("cluster", results)
