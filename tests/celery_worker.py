"""A real Celery worker in a process group of its own, for tests that kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster_processes import ROOT, shifted_clock

from workers.cluster.celery_app import make_app
from workers.contract.stages import DecodeLimits


class WorkerProcess:
    def __init__(
        self,
        url: str,
        concurrency: int = 1,
        limits: DecodeLimits | None = None,
        clock_shift_s: float = 0.0,
    ) -> None:
        limits = limits or DecodeLimits()
        code = (
            "from workers.cluster.worker.preprocess_worker import run\n"
            "from workers.contract.stages import DecodeLimits\n"
            f"run({url!r}, {url!r}, {concurrency}, DecodeLimits({limits.memory_bytes}, {limits.cpu_s}))"
        )
        self._url = url
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=shifted_clock(clock_shift_s),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def child_pids(self) -> list[int]:
        """The prefork processes, which do the decoding."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        with make_app(self._url) as app:
            deadline = time.monotonic() + timeout_s
            while not app.control.ping(timeout=0.2):
                assert self._process.poll() is None and time.monotonic() < deadline, "no worker answers"

    def kill(self) -> None:
        """The worker and its children, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(20)

    def stop(self) -> None:
        """As an operator would."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()


@contextmanager
def celery_worker(
    url: str,
    concurrency: int = 1,
    limits: DecodeLimits | None = None,
    clock_shift_s: float = 0.0,
) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(url, concurrency, limits, clock_shift_s)
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.kill()
