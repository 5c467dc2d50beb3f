"""`vlm serve` as users start it: a process of its own on a free port, with the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class LiveServe:
    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)

    def async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False, limits=limits)

    def children(self, module: str) -> list[psutil.Process]:
        """Processes of the server that run this module."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    def wait_ready(self, timeout_s: float = 60.0) -> float:
        """Seconds until the server says that it is ready."""
        started = time.monotonic()
        with self.client() as http:
            while http.get("/health/ready").status_code != 200:
                assert time.monotonic() - started < timeout_s, "the server does not become ready"
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


def _toml(value: Any) -> str:
    return json.dumps(value)


@contextlib.contextmanager
def vlm_serve(
    folder: Path, *, engine: dict[str, Any] | None = None, expect_exit: int = 0, **settings: Any
) -> Iterator[LiveServe]:
    """Settings are those of ServeConfig; `engine` those of EngineOptions."""
    settings = {"port": 0, "data_dir": str(folder / "data"), **settings}
    config = folder / "vlm.toml"
    tables = {"serve": settings, "engine": engine or {}}
    config.write_text(
        "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm.cli.main", "serve", "--config", str(config)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    live = LiveServe(process)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            live.log.append(line)
            if '"listening"' in line:
                live.url = json.loads(line)["address"]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(120) and live.url, "".join(live.log)
        live.wait_ready()
        yield live
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            reader.join(10)
            if process.stderr:
                process.stderr.close()
        assert code == expect_exit, "".join(live.log)
