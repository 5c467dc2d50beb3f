"""The way of one image through a server: what is parsed, hashed, copied and sent, counted.

Its processes are threads here, with the real sockets, so that all that they do can be counted in one place.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_runner import fake_runner
from PIL import Image

from encoder.batcher import TileBatcher
from llm.request import Finished, SamplingParams
from preprocess import probe as probe_module
from preprocess.stage import preprocess
from vlm.build import build_runner
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from vlm.spec import ModelSpec
from workers.children import child as child_module
from workers.children import frames as frames_module
from workers.children.frames import FrameSocket
from workers.contract.messages import pack_frame
from workers.local import decode_process, engine_process, preprocess_pool
from workers.local.background import Background
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_pool import LocalPreprocess
from workers.local.progress import Progress

API = "api"


class ThreadChild(child_module.Child):
    """A child whose process is a thread of this one."""

    def __init__(self, command: list[str], **_: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._outbox = child_module.Outbox(self.socket)
        is_engine = command[0] == "engine"
        self._thread = threading.Thread(target=serve_engine if is_engine else serve_decodes, args=[theirs])
        self._thread.name = "engine" if is_engine else "decode"
        self._thread.start()

    pid = os.getpid()

    @property
    def exit_status(self) -> int | None:
        return None if self._thread.is_alive() else 0

    async def end(self, grace_s: float = 0.0) -> None:
        self._outbox.close()
        self.socket.close()
        await asyncio.to_thread(self._thread.join)


def serve_decodes(connection: socket.socket) -> None:
    with connection:
        try:
            decode_process.serve(FrameSocket(connection), Background())
        except (EOFError, ConnectionError):
            return


def serve_engine(connection: socket.socket) -> None:
    with connection:
        engine_process.serve(connection, build_runner(EngineOptions()), Progress(np.zeros(1, np.int64)))


class Walk:
    """What was done to an image, by process."""

    def __init__(self) -> None:
        self.parses: Counter[str] = Counter()
        self.file_hashes: Counter[str] = Counter()
        self.tile_hashes: Counter[str] = Counter()
        self.written = 0  # bytes of tiles into shared memory
        self.sent: Counter[str] = Counter()  # bytes beside JSON through sockets
        self.received: list[np.ndarray] = []


def here() -> str:
    name = threading.current_thread().name
    return name if name in ("decode", "engine") else API


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    walk = Walk()
    put_tiles, sha256, write, opened = TileBatcher.put_tiles, hashlib.sha256, os.write, probe_module._open

    def spy(target: Any, name: str, note: Callable[..., None], function: Callable[..., Any]) -> None:
        def both(*args: Any, **kwargs: Any) -> Any:
            note(*args)
            return function(*args, **kwargs)

        monkeypatch.setattr(target, name, both)

    def note_hash(data: Any = b"") -> None:
        size = memoryview(data).nbytes
        if size == len(PHOTO):
            walk.file_hashes[here()] += 1
        elif size == TILES.pixels.nbytes:
            walk.tile_hashes[here()] += 1

    def note_frame(_: object, payload: bytes | memoryview = b"") -> None:
        walk.sent[here()] += len(payload)

    def note_write(_: int, data: Any) -> None:
        walk.written += memoryview(data).nbytes

    monkeypatch.setattr(preprocess_pool, "Child", ThreadChild)
    monkeypatch.setattr(engine_process, "Child", ThreadChild)
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)  # a thread has none
    monkeypatch.setattr(decode_process, "limit_cpu", lambda _: None)
    monkeypatch.setattr(decode_process, "unlimit_cpu", lambda: None)
    monkeypatch.setattr(EngineProcess, "_watch", lambda *_: asyncio.Event().wait())
    spy(probe_module, "_open", lambda *_: walk.parses.update([here()]), opened)
    spy(hashlib, "sha256", note_hash, sha256)
    for module in (child_module, frames_module):
        spy(module, "pack_frame", note_frame, pack_frame)
    spy(os, "write", note_write, write)
    spy(TileBatcher, "put_tiles", lambda _, __, tiles, *___: walk.received.append(tiles), put_tiles)
    yield walk


def photo() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (600, 800, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


SPEC = ModelSpec.load(DEFAULT_MODEL)
PHOTO = photo()
TILES = preprocess(PHOTO, SPEC.preprocess_spec("auto"))


def test_an_image_is_parsed_once_a_process_and_hashed_once_and_its_tiles_are_written_once(walk: Walk) -> None:
    """From the file to the encoder: no socket carries a pixel, and the engine takes the memory as it is."""
    assert TILES.grid.num_tiles > 4 and TILES.pixels.nbytes > 200_000

    async def main() -> None:
        pipeline = Pipeline(SPEC, LocalPreprocess(1), EngineProcess(["engine"]))
        await pipeline.start()
        try:
            message = [ChatMessage("user", (ImageInput(PHOTO), "What is this?"))]
            prepared = pipeline.prepare("r", message, SamplingParams(max_tokens=1))
            last = [event async for event in pipeline.run(prepared)][-1]
            assert isinstance(last, Finished), last
        finally:
            await pipeline.close()

    asyncio.run(main())
    assert walk.parses == {API: 1, "decode": 1}
    assert walk.file_hashes == {API: 1}
    assert not walk.tile_hashes
    assert TILES.pixels.nbytes < walk.written < TILES.pixels.nbytes + 1000
    assert +walk.sent == {API: len(PHOTO)}
    (received,) = walk.received
    assert np.array_equal(received, TILES.pixels) and not received.flags.owndata
    assert b"vlm-tiles" in mapping_of(received)


def mapping_of(pixels: np.ndarray) -> bytes:
    """The line of this process's memory map that holds the pixels."""
    address = pixels.__array_interface__["data"][0]
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split(b"-"))
            if start <= address < end:
                return line
    return b""


def test_tiles_that_arrive_are_not_copied_in_the_engine(walk: Walk) -> None:
    from dataclasses import astuple

    from preprocess.wire import to_parts
    from workers.children.frames import Frame
    from workers.contract.sealed_memory import seal

    runner = fake_runner()
    frame = Frame({"key": "k", "grid": astuple(TILES.grid)}, b"", seal(to_parts(TILES, is_sealed=True)))
    tracemalloc.start()
    try:
        engine_process._put_tiles(runner, frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < TILES.pixels.nbytes / 10
