"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# Before torch loads libgomp, for this process and its children: spinning threads slow each other tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The reference's arithmetic, whatever this CPU does best: tests of another say so.
os.environ.setdefault("VLM_ENCODER_DTYPE", "float32")
if not Path("/dev/nvidia0").exists():  # before triton is imported: it interprets its kernels on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


DURABLE_REDIS = ("redis-server", "--save", "", "--appendonly", "yes", "--appendfsync", "always")


class RedisServer:
    """A real redis-server on a free port, with an append-only file so that a restart loses nothing.

    `command`: another server than that, with options of its own.
    """

    def __init__(self, directory: Path, command: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._command = command or DURABLE_REDIS
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--dir": str(self._directory),
        }
        command = [*self._command, *(word for pair in options.items() for word in pair)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def freeze(self) -> None:
        """Connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        except OSError:
            return False


def _require_redis() -> None:
    if shutil.which("redis-server") is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not on the PATH")
        pytest.skip("redis-server is not on the PATH")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may stop, freeze and start again."""
    _require_redis()
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    _require_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(_shared_redis: RedisServer) -> str:
    """An empty Redis, shared with other tests in turn."""
    with socket.create_connection(("127.0.0.1", _shared_redis.port), timeout=5) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(5) == b"+OK\r\n"
    return _shared_redis.url


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a caption run writes; the working folder is the test's own, with an empty folder `in`."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    return tmp_path / "out.jsonl"
