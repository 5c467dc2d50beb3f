"""One service in its three topologies, and what it answers in one beside what it answers in another.

local: everything behind the API in its own processes. celery: images cut by a Celery worker. cluster: cut,
encoded and answered by Celery workers (one preprocess, one encode, two generate), the API node stateless.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import httpx
import pytest
from celery_worker import celery_worker
from cluster_processes import cluster_worker
from conftest import RedisServer
from live_serve import LiveServe, vlm_serve

TOPOLOGIES = ["local", *(pytest.param(name, marks=pytest.mark.redis) for name in ("celery", "cluster"))]
KEY_NAMES = ("anna", "ben")  # the keys themselves are key-anna and key-ben

# Names by which a test reaches into a server of its own process.
_INSIDE = {"engine", "service", "app", "loop", "live_server", "caplog", "monkeypatch"}
# What differs from run to run or with the caches' state, by key.
_OWN = {
    "created",
    "created_at",
    "expires_at",
    "timings",
    "cached_tokens",
    "expected_ttft_ms",
    "system_fingerprint",
}
_NO_ORDER = {"filename"}  # files made within a second are listed in any order
_OWN_IDS = ("chatcmpl-", "file-", "batch_", "batch-")
_TOLERANCE = 2e-3  # of logprobs: chunks of prefill differ with what a replica's prefix cache holds


@contextlib.contextmanager
def topology(name: str, new_folder: Callable[[str], Path]) -> Iterator[tuple[LiveServe, dict[str, Any]]]:
    """The service and the settings for another API node beside it."""
    if name == "local":
        with vlm_serve(new_folder("serve")) as live:
            yield live, {}
        return
    redis = RedisServer(new_folder("redis"))
    redis.start()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(celery_worker(redis.url, concurrency=2))
            if name == "cluster":
                for kind in ("encode", "generate", "generate"):
                    stack.enter_context(cluster_worker(kind, redis.url))
            settings = {"broker": redis.url, "remote_engine": name == "cluster"}
            yield stack.enter_context(vlm_serve(new_folder("serve"), **settings)), settings
    finally:
        redis.stop()


def write_keys(path: Path) -> str:
    rows = (
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(f"key-{name}".encode()).hexdigest()}"\n'
        for name in KEY_NAMES
    )
    path.write_text("".join(rows))
    return str(path)


def over_http(module: ModuleType, fixtures: set[str], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The module's tests that use one of the fixtures and touch a server by HTTP only; `but` are left out."""
    found = {}
    for name, test in vars(module).items():
        if not name.startswith("test_") or name in but:
            continue
        code: CodeType = test.__code__
        takes = set(code.co_varnames[: code.co_argcount])
        if takes & fixtures and not (takes | _names(code)) & _INSIDE:
            found[name] = test
    assert set(but) <= vars(module).keys()
    return found


def _names(code: CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


class Answers:
    """Answers in the order of each test's requests, held against those of the first topology that ran it."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, list[Any]]] = {}
        self._seen: list[Any] = []
        self.num_compared = 0

    def hooks(self) -> dict[str, list[Callable[[httpx.Response], None]]]:
        return {"response": [self._note]}

    def begin(self) -> None:
        self._seen = []

    def compare(self, test: str, where: str) -> None:
        first, expected = self._first.setdefault(test, (where, self._seen))
        if first == where:
            return
        assert len(self._seen) == len(expected), f"{where} answered more or fewer requests than {first}"
        for there, here in zip(expected, self._seen, strict=True):
            assert same(there, here), f"{first}: {there}\n{where}: {here}"
            self.num_compared += 1

    def _note(self, response: httpx.Response) -> None:
        path = response.request.url.path
        if path.startswith(("/health", "/metrics", "/static")) or path == "/":
            return
        response.read()
        kind = response.headers.get("content-type", "")
        value: Any = response.text
        if kind.startswith("application/json"):
            value = _shared(response.json())
        elif kind.startswith("text/event-stream"):
            value = _joined(response.text)
        self._seen.append([response.status_code, value])


def _shared(value: Any) -> Any:
    if isinstance(value, list):
        return [_shared(item) for item in value]
    if not isinstance(value, dict):
        return None if isinstance(value, str) and value.startswith(_OWN_IDS) else value
    return {key: _shared(item) for key, item in value.items() if key not in _OWN | _NO_ORDER}


def _joined(text: str) -> list[Any]:
    """A stream without its chunks: per choice the text and the ending, then the rest."""
    choices: dict[int, list[Any]] = {}
    rest: list[Any] = []
    for line in text.split("\n\n"):
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            rest += [data] if data else []
            continue
        chunk = json.loads(data)
        for choice in chunk.get("choices", ()):
            known = choices.setdefault(choice["index"], ["", None, []])
            known[0] += choice["delta"].get("content") or ""
            known[1] = choice["finish_reason"] or known[1]
            known[2] += _shared((choice.get("logprobs") or {}).get("content") or [])
        rest += [_shared(chunk[key]) for key in ("usage", "error") if chunk.get(key)]
    return [sorted(choices.items()), rest]


def same(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of logprobs."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= _TOLERANCE
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
