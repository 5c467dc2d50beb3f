"""`vlm serve` in a process of its own on a free port, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def children(self, module: str) -> list[psutil.Process]:
        """Processes of the server that run this module."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout_s: float = 90.0) -> float:
        """Seconds until the server says that it is ready. Raises TimeoutError."""
        started = time.monotonic()
        while not self.ready():
            if time.monotonic() - started > timeout_s:
                raise TimeoutError("the server did not become ready")
            time.sleep(0.05)
        return time.monotonic() - started

    def memory_bytes(self) -> int:
        """Resident, over the process tree."""
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def cpu_seconds(self) -> float:
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        total = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}


def _write_config(path: Path, tables: dict[str, dict[str, Any]]) -> None:
    path.write_text(
        "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )
    )


@contextlib.contextmanager
def served(folder: Path, *, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    """Settings are those of ServeConfig, `engine` those of EngineOptions. Raises RuntimeError with the log
    of a server that does not start or does not end well."""
    config = folder / "vlm.toml"
    settings = {"port": 0, "data_dir": str(folder / "data"), "log_format": "json", **settings}
    _write_config(config, {"serve": settings, "engine": engine or {}})
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm.cli.main", "serve", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )
    live = Served(process)
    listening = threading.Event()
    reader = threading.Thread(target=_read_log, args=(live, listening))
    reader.start()
    try:
        if not listening.wait(START_TIMEOUT_S) or not live.url:
            raise RuntimeError("".join(live.log) or "the server did not start")
        live.wait_ready()
        yield live
    finally:
        code = _stop(process)
        reader.join(10)
        if process.stderr:
            process.stderr.close()
    if code != 0:
        raise RuntimeError(f"the server ended with {code}: " + "".join(live.log[-20:]))


def _read_log(live: Served, listening: threading.Event) -> None:
    assert live.process.stderr is not None
    for line in live.process.stderr:
        live.log.append(line)
        if not live.url and '"message": "listening"' in line:
            live.url = json.loads(line)["address"]
            listening.set()
    listening.set()


def _stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
