"""`vlm serve` as users start it, with clients that wait long enough for a busy machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from vlm.bench.harness.server_process import Served, served

ROOT = Path(__file__).resolve().parent.parent


class LiveServe(Served):
    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)

    def async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False, limits=limits)


@contextlib.contextmanager
def vlm_serve(folder: Path, *, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[LiveServe]:
    with served(folder, engine=engine, **settings) as live:
        yield LiveServe(live.process, live.url, live.log)
