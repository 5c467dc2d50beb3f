"""The disk cache: what is damaged or another's is a miss, its size is bounded, and it outlives a kill."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from direct_cluster import ask, picture, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until, wait_for

from llm.request import SamplingParams
from llm.scheduling.blocks import BlockKey
from vlm.build import build_runner, engine_command
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.contract.visual_format import VisualFormat
from workers.local.disk_cache import DiskCache, weights_digest
from workers.local.disk_store import DiskStore
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_inline import InlinePreprocess

FORM = VisualFormat("revision", "float32", 4)
KEY = BlockKey(b"k" * 32)


def file_of(folder: Path) -> Path:
    (path,) = [path for path in folder.rglob("*") if path.is_file()]
    return path


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=200), cut=st.integers(0, 300), flip=st.integers(0, 300))
def test_a_torn_or_damaged_file_is_a_miss_and_goes(content: bytes, cut: int, flip: int) -> None:
    import tempfile

    for damage in ("cut", "flip", "grow"):
        with tempfile.TemporaryDirectory() as name:
            store = DiskStore(Path(name), 1 << 20)
            assert store.put("key", content) and store.get("key") == content
            path = file_of(Path(name))
            data = bytearray(path.read_bytes())
            if damage == "cut":
                data = data[: min(cut, len(data) - 1)]
            elif damage == "flip":
                data[flip % len(data)] ^= 0x40
            else:
                data += b"x"
            path.write_bytes(data)
            assert store.get("key") is None and not path.exists()
            assert store.put("key", content) and store.get("key") == content


def test_a_file_under_another_key_is_a_miss(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put("mine", b"content")
    other = store._path("other")
    other.parent.mkdir(exist_ok=True)
    file_of(tmp_path).rename(other)
    assert store.get("other") is None and store.get("mine") is None


def test_the_least_recently_used_go_first_and_the_cap_holds(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 20_000)
    for number in range(40):
        assert store.put(f"key{number}", bytes(1000))
        os.utime(store._path(f"key{number}"), (number, number))
        assert store.used_bytes <= 20_000
    assert store.get("key39") is not None and store.get("key0") is None
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 20_000
    assert not store.put("huge", bytes(30_000))


def test_use_keeps_an_entry(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 5000)
    for number in range(4):
        store.put(f"key{number}", bytes(1000))
        os.utime(store._path(f"key{number}"), (number, number))
    assert store.get("key0") is not None
    store.put("key4", bytes(1000))
    store.make_room()
    assert store.get("key0") is not None and store.get("key1") is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_costs_the_entry_alone_and_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put("before", b"kept")
    opened: list[str] = []
    open_ = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.endswith(".part"):
            opened.append(path.name)
            raise OSError(code, os.strerror(code))
        return open_(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        assert not store.put("key", b"lost") and not store.put("more", b"lost")
    assert len(opened) == 1 and store.get("before") == b"kept" and store.get("key") is None
    store._paused_until = 0.0
    assert store.put("key", b"kept")


def test_a_folder_without_its_files_is_filled_anew(tmp_path: Path) -> None:
    import shutil

    store = DiskStore(tmp_path / "folder", 1 << 20)
    store.put("key", b"one")
    shutil.rmtree(tmp_path / "folder")
    assert store.get("key") is None and not store.put("key", b"two")
    store._paused_until = 0.0
    (tmp_path / "folder").mkdir()
    assert store.put("key", b"two") and store.get("key") == b"two"


def test_what_a_killed_writer_left_goes_once_it_is_old(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 20)
    store.put("key", b"one")
    left = file_of(tmp_path).with_name("key2.1.1.part")
    left.write_bytes(b"half")
    store.make_room()
    assert left.exists()  # somebody may be writing it
    os.utime(left, (1, 1))
    store.make_room()
    assert not left.exists() and store.get("key") == b"one"


WRITER = """
import sys
from pathlib import Path
from workers.local.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), 60_000)
for number in range(300):
    key = f"key{number % 40}"
    store.put(key, key.encode() * 400)
    found = store.get(f"key{(number * 7) % 40}")
    assert found is None or found == f"key{(number * 7) % 40}".encode() * 400
"""


def test_processes_that_share_a_folder_read_whole_entries_and_keep_its_cap(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=env) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    DiskStore(tmp_path, 60_000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 60_000


def open_cache(folder: Path, kv: str = "model", form: VisualFormat = FORM) -> DiskCache:
    return DiskCache(folder, 1 << 20, kv, form)


def test_blocks_and_visual_tokens_of_another_model_are_misses(tmp_path: Path) -> None:
    import torch

    cache = open_cache(tmp_path)
    assert cache.write(KEY, b"block") and cache.has(KEY)
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    cache.keep_visual("image", rows)  # type: ignore[arg-type]
    cache.close()
    again, other = open_cache(tmp_path), open_cache(tmp_path, "other")
    assert again.has(KEY) and again.read([KEY]).result() == [b"block"]
    assert not other.has(KEY) and other.read([KEY]).result() == []
    assert torch.equal(again.visual("image"), rows)  # type: ignore[arg-type]
    for form in (replace(FORM, revision="new"), replace(FORM, width=2)):
        assert open_cache(tmp_path, form=form).visual("image") is None  # type: ignore[arg-type]


def test_a_read_ends_at_the_first_block_that_is_not_there(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    keys = [BlockKey(bytes([number]) * 32) for number in range(4)]
    for key in (keys[0], keys[1], keys[3]):
        cache.write(key, key)
    wait_for(lambda: not cache._pending)
    assert cache.read(keys).result() == keys[:2]
    cache.close()


def test_more_than_may_wait_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.local.disk_cache._MAX_PENDING_BYTES", 10)
    cache = open_cache(tmp_path)
    assert not cache.write(KEY, bytes(11))
    assert cache.write(KEY, bytes(9))
    cache.close()
    assert not cache._pending_bytes


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_saved_blocks_are_restored_to_the_bit(backend: str, kv: str) -> None:
    runner = build_runner(EngineOptions(kv_cache_mb=8, backend=backend, kv=kv))  # type: ignore[arg-type]
    device = runner.engine._backend
    pool: Any = device._pool if backend == "native" else device.pool.data  # type: ignore[attr-defined]
    values = np.asarray(pool)
    values[...] = np.random.default_rng(0).integers(0, 100, values.shape).astype(values.dtype)
    saved = device.save_blocks((1, 3))
    device.load_blocks(saved, (5, 4))
    assert device.save_blocks((5, 4)) == saved != device.save_blocks((6, 7))
    for wrong in ([saved[0][:-1], saved[1]], [saved[0] + b"x", saved[1]]):
        with pytest.raises(ValueError):
            device.load_blocks(wrong, (5, 4))
    assert device.save_blocks((5, 4)) == saved


def test_a_checkpoint_is_named_by_its_weights(tmp_path: Path) -> None:
    import shutil

    before = weights_digest(Path(DEFAULT_MODEL))
    shutil.copytree(DEFAULT_MODEL, tmp_path / "model")
    assert weights_digest(tmp_path / "model") == before
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert weights_digest(tmp_path / "model") != before


@pytest.mark.timeout(120)
def test_a_question_after_a_kill_finds_its_image_encoded_and_its_prompt_computed(tmp_path: Path) -> None:
    options = EngineOptions(kv_cache_mb=16, kv_disk=str(tmp_path))
    params = SamplingParams(max_tokens=12)

    async def main() -> None:
        engine = EngineProcess(engine_command(options))
        pipeline = Pipeline(ModelSpec.load(DEFAULT_MODEL), InlinePreprocess(), engine)
        await pipeline.start()
        try:
            first = text_of(await ask(pipeline, "first", picture(1), params))
            cold = (await engine.stats())["encoder"]["tiles"]
            assert cold > 0
            await until(lambda: len([p for p in tmp_path.rglob("visual-*") if p.suffix != ".part"]) == 1)
            await settled(tmp_path)
            os.kill(engine.pid or 0, signal.SIGKILL)
            await until(lambda: engine.restarts == 1 and engine.ready)
            assert text_of(await ask(pipeline, "second", picture(1), params)) == first
            stats = await engine.stats()
            assert stats["encoder"]["tiles"] == 0 and stats["disk"]["bytes"] > 0
            assert stats["engine"]["kv_saved_read"] > 0
        finally:
            await pipeline.close()

    asyncio.run(main())


async def settled(folder: Path) -> None:
    """Until no more files come."""
    before = -1
    while (count := len(list(folder.rglob("*")))) != before:
        before = count
        await asyncio.sleep(0.3)


def test_a_folder_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="kv_disk"):
        build_runner(EngineOptions(kv_cache_mb=8, kv_disk=str(tmp_path / "file" / "below")))
