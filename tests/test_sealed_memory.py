"""Tiles that processes share: nobody can change them, nobody can end their readers, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.types import TileGrid, Tiles
from preprocess.wire import from_bytes, to_bytes, to_parts
from workers.children.frames import FrameSocket
from workers.children.outbox import Outbox
from workers.contract.sealed_memory import SealedMemory, seal
from workers.contract.tiles_handle import SealedTiles

GRID = TileGrid(1, 2, True, 4, 3)
TILES = Tiles(np.arange(3 * 3 * 4 * 3, dtype=np.uint8).reshape(3, 3, 4, 3), GRID)
SEALED = b"".join(to_parts(TILES, is_sealed=True))


def sealed(data: bytes) -> int:
    descriptor = seal([data])
    assert descriptor is not None
    return descriptor


def is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("change", ["write", "shrink", "grow", "unseal"])
def test_what_is_sealed_stays_as_it_was_written(change: str) -> None:
    memory = SealedMemory(sealed(b"as it was"))
    writable = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
    try:
        with pytest.raises(OSError):
            match change:
                case "write":
                    os.pwrite(writable, b"x", 0)
                case "shrink":
                    os.ftruncate(writable, 1)
                case "grow":
                    os.ftruncate(writable, 1 << 20)
                case "unseal":
                    import fcntl

                    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, 0)
    finally:
        os.close(writable)
    assert bytes(memory.map()) == b"as it was"


def test_a_mapping_outlives_the_descriptor_and_nothing_is_left_after_both() -> None:
    handle = SealedTiles(sealed(SEALED), GRID)
    descriptor = handle.memory.descriptor
    pixels = handle.open().pixels
    handle.close()
    assert not is_open(descriptor)
    assert np.array_equal(pixels, TILES.pixels) and not pixels.flags.writeable
    forgotten = SealedTiles(sealed(SEALED), GRID).memory.descriptor
    gc.collect()
    assert not is_open(forgotten)


@pytest.mark.parametrize("what", ["a file", "a pipe", "a grid that was not planned", "too short", "empty"])
def test_memory_that_can_not_be_these_tiles_is_refused_and_closed(what: str, tmp_path: Path) -> None:
    grid = GRID
    match what:
        case "a file":
            path = tmp_path / "tiles"
            path.write_bytes(SEALED)
            descriptor = os.open(path, os.O_RDONLY)
        case "a pipe":
            descriptor, other = os.pipe()
            os.close(other)
        case "a grid that was not planned":
            descriptor, grid = sealed(SEALED), TileGrid(2, 1, True, 4, 3)
        case "too short":
            descriptor = sealed(SEALED[:-1])
        case _:
            descriptor = sealed(b"")
    with pytest.raises(ValueError):
        SealedTiles(descriptor, grid)
    assert not is_open(descriptor)


def test_tiles_without_a_digest_are_taken_from_sealed_memory_alone() -> None:
    assert b"".join(to_parts(TILES)) == to_bytes(TILES)
    with pytest.raises(ValueError):
        from_bytes(SEALED, GRID)
    with pytest.raises(ValueError):
        SealedTiles(sealed(to_bytes(TILES)), GRID)
    assert SealedTiles(sealed(SEALED), GRID).wire() == to_bytes(TILES)


frames = st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(frames)
def test_frames_arrive_whole_and_in_order_with_their_descriptors(sent: list[tuple[int, bool]]) -> None:
    """However full the socket is: payloads are larger than what it holds."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def read() -> list[tuple[int, int, bool]]:
        got = []
        connection = FrameSocket(theirs)
        for _ in sent:
            frame = connection.receive()
            content = None
            if frame.descriptor is not None:
                content = bytes(SealedMemory(frame.descriptor).map())
            number = frame.header["number"]
            assert content in (None, b"%d" % number)
            got.append((number, len(frame.payload), content is not None))
        return got

    async def main() -> None:
        from workers.contract.messages import pack_frame

        outbox = Outbox(ours)
        reading = asyncio.create_task(asyncio.to_thread(read))
        for number, (size, has_memory) in enumerate(sent):
            descriptor = sealed(b"%d" % number) if has_memory else None
            outbox.put(pack_frame({"number": number}, bytes(size)), descriptor)
            if descriptor is not None:
                os.close(descriptor)  # the outbox has its own
        await outbox.flushed()
        assert await reading == [(n, size, memory) for n, (size, memory) in enumerate(sent)]

    with ours, theirs:
        asyncio.run(main())


def test_who_sends_to_nobody_is_told_and_leaks_nothing() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        outbox = Outbox(ours)
        descriptor = sealed(b"x")
        outbox.put([bytes(10_000_000)], None)
        outbox.put([b"y"], descriptor)
        os.close(descriptor)
        waiting = asyncio.create_task(outbox.flushed())
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(BrokenPipeError):
            await waiting
        with pytest.raises(BrokenPipeError):
            outbox.put([b"more"])
        ours.close()
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(int(fd))]
        assert not any("vlm-tiles" in name for name in held)

    asyncio.run(main())
