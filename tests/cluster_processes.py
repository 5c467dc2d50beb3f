"""Encode and generate workers as operators run them, in process groups of their own: tests kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from workers.cluster.members import Registry
from workers.cluster.names import ENCODER, REPLICA
from workers.cluster.redis_client import connect

ROOT = Path(__file__).resolve().parent.parent


class ClusterWorker:
    """`vlm worker KIND`, alive once it is in the registry."""

    def __init__(self, kind: str, url: str, *options: str, clock_shift_s: float = 0.0) -> None:
        self._kind = {"generate": REPLICA, "encode": ENCODER}[kind]
        self._url = url
        client = connect(url)
        self._before = set(Registry(client, self._kind).alive())
        client.close()
        self.name = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vlm.cli.main", "worker", kind, "--broker", url, *options],
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("VLM_TEST_STDERR") else subprocess.DEVNULL,
            env={**shifted_clock(clock_shift_s), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        client = connect(self._url)
        while True:
            new = set(Registry(client, self._kind).alive()) - self._before
            if new:
                self.name = min(new)
                break
            assert self._process.poll() is None and time.monotonic() < deadline, "the worker did not start"
            time.sleep(0.1)
        client.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(20)

    def terminate(self) -> int:
        """As an operator would; the exit status."""
        self._process.terminate()
        return self._process.wait(60)


def shifted_clock(shift_s: float) -> dict[str, str]:
    """The environment of a process whose wall clock is so many seconds ahead."""
    if not shift_s:
        return dict(os.environ)
    path = os.pathsep.join(filter(None, (str(ROOT / "tests/shifted_clock"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "VLM_TEST_CLOCK_SHIFT_S": str(shift_s)}


@contextlib.contextmanager
def cluster_worker(kind: str, url: str, *options: str, clock_shift_s: float = 0.0) -> Iterator[ClusterWorker]:
    worker = ClusterWorker(kind, url, *options, clock_shift_s=clock_shift_s)
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.kill()
