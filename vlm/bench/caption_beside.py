"""Interactive requests beside a batch of /v1/batches, in `vlm serve`: users.md S7."""

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

from vlm.bench.client import Client, Sample
from vlm.bench.pages import draw_page, encode
from vlm.bench.report import result, say
from vlm.bench.serve import chat_body, percentile
from vlm.bench.serving import Served, served

KINDS = (("cold", "Read the text."), ("warm", "Describe the image."))
ROW_TOKENS = 64
BREATH_S = 0.02  # between two requests: they come one by one
_BOUNDARY = "vlm-bench"


def beside_interactive(root: Path, num_images: int, num_rows: int) -> dict[str, Any]:
    """Each image first cold, then with another question warm; alone, then as many others beside a batch."""
    with served(root) as server:
        asyncio.run(_ask(server, 4000, 3))
        say("interactive requests alone")
        idle = asyncio.run(_ask(server, 5000, num_images))
        say(f"and beside a batch of {num_rows} rows")
        with _batch(server, num_rows) as batch_id:
            before, started = _completed(server, batch_id), time.perf_counter()
            busy = asyncio.run(_ask(server, 6000, num_images))
            beside = (_completed(server, batch_id) - before) / (time.perf_counter() - started)
            before, started = _completed(server, batch_id), time.perf_counter()
            time.sleep(3.0)
            alone = (_completed(server, batch_id) - before) / (time.perf_counter() - started)
    return _figures(idle, busy) | {
        "batch_rows_kept_beside_interactive": result(
            beside / alone, "of the rate alone", rows_per_s=round(alone, 1)
        )
    }


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
    client = Client(*server.address)
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
def _batch(server: Served, num_rows: int) -> Iterator[str]:
    """A batch whose rows fill the engine, cancelled at the end."""
    made = _call(server, "/v1/files", _form(_rows(num_rows)), f"multipart/form-data; boundary={_BOUNDARY}")
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


def _rows(num_rows: int) -> bytes:
    lines = []
    for number in range(num_rows):
        image = encode(draw_page(20_000 + number, max_scale=2.0), "JPEG")
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
