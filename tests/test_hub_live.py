"""`vlm serve --model ORG/NAME` as users start it: pulled, interrupted, resumed, answering, then offline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine_client import image_part
from fidelity import random_checkpoint
from live_serve import vlm_serve
from local_hub import LocalHub, Repo, files_of
from PIL import Image

from test_end_to_end import png  # isort: skip

NAME = "some-org/Some.Model-1"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two weight files, the first larger than the 10 MiB that huggingface_hub writes at a time."""
    made = files_of(
        random_checkpoint(tmp_path_factory.mktemp("made"), 3, intermediate=20_000, shard_size="16MB")
    )
    assert sorted(name for name in made if name.endswith(".safetensors")) == list(SHARDS)
    assert len(made[SHARDS[0]]) > 12 * MIB
    return made


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with LocalHub().running() as hub:
        hub.repos[NAME] = Repo(dict(files))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield hub


def serve(data: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vlm.cli.main", "serve", "--model", NAME, "--port", "0"]
    environment = {**os.environ, "VLM_DATA_DIR": str(data)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def refusal(data: Path) -> str:
    """The last line of a server that does not start."""
    process = serve(data)
    try:
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2 and "Traceback" not in said, said
    return said.strip().splitlines()[-1]


def answer(folder: Path) -> str:
    folder.mkdir()
    with vlm_serve(folder, engine={"model": NAME}) as live, live.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == NAME
        image = image_part(png(Image.new("RGB", (90, 60), "teal")))
        content = [image, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        done = client.post("/v1/chat/completions", json={"model": NAME, **body})
        assert done.status_code == 200, done.text
        assert done.json()["usage"]["completion_tokens"] > 0
        return str(done.json()["choices"][0]["message"]["content"])


def cached(home: Path) -> set[str]:
    return {path.name for path in home.rglob("snapshots/*/*.safetensors") if path.exists()}


def test_a_model_is_pulled_over_a_dying_connection_and_a_killed_server_then_served_offline(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.die_after[SHARDS[0]] = 12 * MIB
    hub.hold_after[SHARDS[1]] = MIB
    first = serve(tmp_path / "data")
    try:
        assert hub.held.wait(100), "the second weight file was never asked for"
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert hub.ranges == [(SHARDS[0], f"bytes={10 * MIB}-")]  # in one process, within the file
    assert cached(tmp_path / "home") == {SHARDS[0]}
    before = hub.gets[SHARDS[0]]

    online = answer(tmp_path / "online")
    assert hub.gets[SHARDS[0]] == before  # a whole file is kept when a process dies
    assert cached(tmp_path / "home") == set(SHARDS)

    seen = hub.gets.copy()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert answer(tmp_path / "offline") == online
    assert hub.gets == seen


@pytest.mark.parametrize("fault", ["other bytes", "cut short"])
def test_a_damaged_file_stops_the_server_and_is_not_kept(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    true = hub.repos[NAME].files[SHARDS[1]]
    hub.lies[SHARDS[1]] = true[:-8] + b"\0" * 8 if fault == "other bytes" else true[:-8]
    line = refusal(tmp_path / "data")
    assert line.startswith("vlm: ") and "arrived damaged" in line
    assert cached(tmp_path / "home") == {SHARDS[0]}
    assert not list((tmp_path / "home").rglob("*.incomplete"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert f"only partly in the cache (it lacks {SHARDS[1]})" in refusal(tmp_path / "data")
