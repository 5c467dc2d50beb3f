"""Interactive requests beside a batch of /v1/batches, in `vlm serve`."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlm.bench.harness.bench_pages import draw_page, encode
from vlm.bench.harness.load_client import LoadClient, Sample
from vlm.bench.harness.results import result, say, spread
from vlm.bench.harness.server_process import Served, served
from vlm.bench.serving.mix import chat_body, percentile

KINDS = (("cold", "Read the text."), ("warm", "Describe the image."))
ROUNDS = 5
ROW_TOKENS = 64
ALONE_S = 1.5  # of the batch, after each round
BREATH_S = 0.02  # between two requests: they come one by one
_BOUNDARY = "vlm-bench"


def beside_interactive(root: Path, num_images: int, num_rows: int) -> dict[str, Any]:
    """Each image first cold, then with another question warm. Rounds alone and beside a batch alternate, so
    that whatever else the machine does meets both alike."""
    idle: dict[str, list[Sample]] = {kind: [] for kind, _ in KINDS}
    busy: dict[str, list[Sample]] = {kind: [] for kind, _ in KINDS}
    kept: list[float] = []
    count = num_images // ROUNDS
    with served(root) as server:
        asyncio.run(_ask(server, 4000, 3))
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}: requests alone, then beside a batch")
            _join(idle, asyncio.run(_ask(server, 5000 + number * count, count)))
            with _batch(server, 20_000 + number * num_rows, num_rows // ROUNDS) as batch_id:
                rate = _Rate(server, batch_id)
                _join(busy, asyncio.run(_ask(server, 6000 + number * count, count)))
                beside = rate.read()
                time.sleep(ALONE_S)
                kept.append(beside / rate.read())
    return _figures(idle, busy) | {
        "batch_rows_kept_beside_interactive": result(
            statistics.median(kept), "of the rate alone", spread=spread(kept)
        )
    }


def _join(all_rounds: dict[str, list[Sample]], one: dict[str, list[Sample]]) -> None:
    for kind, samples in one.items():
        all_rounds[kind] += samples


class _Rate:
    """Rows per second since it was made or read last."""

    def __init__(self, server: Served, batch_id: str) -> None:
        self._server, self._batch_id = server, batch_id
        self._rows, self._at = _completed(server, batch_id), time.perf_counter()

    def read(self) -> float:
        rows, at = self._rows, self._at
        self._rows, self._at = _completed(self._server, self._batch_id), time.perf_counter()
        return (self._rows - rows) / (self._at - at)


def _figures(idle: dict[str, list[Sample]], busy: dict[str, list[Sample]]) -> dict[str, Any]:
    """Clients' clock first; `engine_*` is the server's own, without sockets and their processes' turns.
    A step is the gap between two tokens beside the batch."""
    results = {}
    for kind, _ in KINDS:
        clocks = {
            "": lambda sample: sample.ttft_ms,
            "engine_": lambda sample: sample.timings["ttft_ms"],
        }
        for name, clock in clocks.items():
            quiet, loaded = ([clock(sample) for sample in group[kind]] for group in (idle, busy))
            results[f"{kind}_{name}ttft_p95_beside_batch_over_idle"] = result(
                percentile(loaded, 0.95) / percentile(quiet, 0.95),
                "times",
                model="vlm-default",
                requests=len(loaded),
                idle_ms=round(percentile(quiet, 0.95), 1),
                beside_batch_ms=round(percentile(loaded, 0.95), 1),
                median_over_idle=round(statistics.median(loaded) / statistics.median(quiet), 2),
            )
    idle_ms = percentile([sample.ttft_ms for sample in idle["warm"]], 0.95)
    busy_ms = percentile([sample.ttft_ms for sample in busy["warm"]], 0.95)
    step_ms = percentile([gap for group in busy.values() for sample in group for gap in sample.gaps_ms], 0.95)
    results["warm_ttft_p95_over_idle_and_a_step"] = result(
        busy_ms / (idle_ms + step_ms), "times", model="vlm-default", step_p95_ms=round(step_ms, 1)
    )
    return results


async def _ask(server: Served, first: int, count: int) -> dict[str, list[Sample]]:
    client = LoadClient(*server.address)
    samples: dict[str, list[Sample]] = {kind: [] for kind, _ in KINDS}
    for number in range(first, first + count):
        image = encode(draw_page(number, max_scale=2.0), "JPEG")
        for kind, question in KINDS:
            sample = await client.ask(chat_body(image, question, max_tokens=4))
            if not sample.completed:
                raise RuntimeError(f"a request was answered with {sample.status} {sample.error}")
            samples[kind].append(sample)
            await asyncio.sleep(BREATH_S)
    await client.close()
    return samples


@contextmanager
def _batch(server: Served, first: int, num_rows: int) -> Iterator[str]:
    """A batch whose rows fill the engine, cancelled at the end."""
    made = _call(
        server, "/v1/files", _form(_rows(first, num_rows)), f"multipart/form-data; boundary={_BOUNDARY}"
    )
    asked = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = _call(server, "/v1/batches", json.dumps(asked).encode())["id"]
    try:
        while _completed(server, batch_id) < 24:  # more than run at once: it is in its steady state
            time.sleep(0.1)
        yield batch_id
        if _call(server, f"/v1/batches/{batch_id}")["status"] != "in_progress":
            raise RuntimeError("the batch ended before it was measured")
    finally:
        _call(server, f"/v1/batches/{batch_id}/cancel", b"")


def _rows(first: int, num_rows: int) -> bytes:
    lines = []
    for number in range(num_rows):
        image = encode(draw_page(first + number, max_scale=2.0), "JPEG")
        body = json.loads(chat_body(image, "Read the text.", max_tokens=ROW_TOKENS))
        del body["stream"], body["stream_options"]
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


def _form(data: bytes) -> bytes:
    part = "content-disposition: form-data; name="
    return b"".join(
        (
            f'--{_BOUNDARY}\r\n{part}"purpose"\r\n\r\nbatch\r\n'.encode(),
            f'--{_BOUNDARY}\r\n{part}"file"; filename="rows.jsonl"\r\n\r\n'.encode(),
            data,
            f"\r\n--{_BOUNDARY}--\r\n".encode(),
        )
    )


def _completed(server: Served, batch_id: str) -> int:
    return int(_call(server, f"/v1/batches/{batch_id}")["request_counts"]["completed"])


def _call(
    server: Served, path: str, data: bytes | None = None, content_type: str = "application/json"
) -> dict[str, Any]:
    """A GET without data, a POST with it."""
    request = urllib.request.Request(server.url + path, data, {"content-type": content_type})
    with urllib.request.urlopen(request, timeout=60) as answer:
        value: dict[str, Any] = json.loads(answer.read())
    return value
