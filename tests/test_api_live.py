"""The whole service as users run it, with images decoded by its own processes and by Celery workers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from celery_worker import celery_worker
from conftest import RedisServer
from fake_engine_client import ask, image_part, model_spec
from live_serve import ROOT, LiveServe, vlm_serve
from PIL import Image
from topologies import TOPOLOGIES, topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
SAMPLES = ROOT / "vlm" / "samples"


def sample() -> tuple[bytes, list[tuple[str, str]]]:
    entry = json.loads((SAMPLES / "samples.json").read_text())[0]
    return (SAMPLES / entry["file"]).read_bytes(), [(q, a) for q, a in entry["qa"]]


def noise(seed: int, width: int, height: int, form: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(buffer, form)
    return buffer.getvalue()


@pytest.fixture(scope="module", params=TOPOLOGIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServe]:
    with topology(request.param, tmp_path_factory.mktemp) as (live, _):
        yield live


@pytest.fixture
def official(server: LiveServe) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_official_client_gets_the_same_answers_streaming_or_not(official: openai.OpenAI) -> None:
    data, truths = sample()
    for number, (question, truth) in enumerate(truths):
        plain = official.chat.completions.create(
            model="vlm-default", temperature=0, max_tokens=64, **ask(data, question)
        )
        content = plain.choices[0].message.content
        assert content and (number or content.strip() == truth)
        stream = official.chat.completions.create(
            model="vlm-default", temperature=0, max_tokens=64, stream=True, **ask(data, question)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == content


def test_several_images_and_later_questions_reuse_them(server: LiveServe) -> None:
    data, truths = sample()
    other = noise(1, 300, 200)
    with server.client() as http:
        first = http.post(CHAT, json=ask(data, other, truths[0][0], temperature=0)).json()
        again = http.post(CHAT, json=ask(data, other, truths[0][0], temperature=0)).json()
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    details = again["usage"]["prompt_tokens_details"]
    sizes = [Image.open(io.BytesIO(image)).size for image in (data, other)]
    tiles = sum(model_spec().preprocess.rule.grid(*size).num_tiles for size in sizes)
    assert details["image_tokens"] == tiles * model_spec().geometry.tokens_per_tile
    assert details["cached_tokens"] >= details["image_tokens"] and again["timings"]["encode_ms"] == 0


def test_every_way_in_gives_equal_answers_and_counts(server: LiveServe) -> None:
    """D2 and issue 4 item 4."""
    data = noise(2, 500, 333)
    with server.client() as http:
        stored = http.post("/v1/images", files={"file": data}).json()
        parts = (image_part(data), {"type": "image_url", "image_url": {"url": stored["id"]}})
        answers = [http.post(CHAT, json=ask(part, "What is it?", temperature=0)).json() for part in parts]
        count = http.post("/v1/tokenize", json=ask(image_part(data), "What is it?")).json()
    assert answers[0]["choices"] == answers[1]["choices"]
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {count["prompt_tokens"]}


_ANSWERS: dict[str, Any] = {}


def test_all_topologies_answer_alike(server: LiveServe) -> None:
    """Equal answers, token counts and ids, whoever decodes."""
    seen = []
    with server.client() as http:
        for seed in range(3):
            data = noise(seed, 200 + 50 * seed, 160)
            made = http.post(CHAT, json=ask(data, "Describe it.", temperature=0, max_tokens=24)).json()
            stored = http.post("/v1/images", files={"file": data}).json()
            counts = {k: v for k, v in made["usage"].items() if k != "prompt_tokens_details"}
            seen.append((made["choices"], counts, stored["id"], stored["tiles"]))
    expected = _ANSWERS.setdefault("texts", seen)
    assert seen == expected


def test_a_damaged_image_is_the_clients_fault(server: LiveServe) -> None:
    """D7, through the real decoders."""
    data = noise(3, 400, 300)
    with server.client() as http:
        answered = http.post(CHAT, json=ask(data[: len(data) // 2], "What?"))
    assert answered.status_code == 400 and answered.json()["error"]["code"] == "invalid_image"


_PROBE = """
import http.client, json, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
times = []
print("up", flush=True)
import threading
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
while not done.is_set():
    started = time.perf_counter()
    connection.request("GET", "/health/live")
    answer = connection.getresponse()
    answer.read()
    times.append(time.perf_counter() - started)
    assert answer.status == 200
    time.sleep(0.01)
print(json.dumps(times))
"""


@contextlib.contextmanager
def liveness_probe(server: LiveServe) -> Iterator[list[float]]:
    """Latencies of /health/live, measured by a process that does nothing else."""
    command = [sys.executable, "-c", _PROBE, server.url.removeprefix("http://")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout and process.stdout.readline() == "up\n"
    times: list[float] = []
    try:
        yield times
    finally:
        process.stdin.close()
        times += sorted(json.loads(process.stdout.read()))
        process.wait()
        process.stdout.close()


def test_liveness_answers_while_64_images_decode(server: LiveServe) -> None:
    """S1: liveness keeps answering; its latencies are printed, the benchmark `serve` reports them."""
    bodies = [json.dumps(ask(noise(100 + i, 2000, 1500), "What?", max_tokens=4)) for i in range(64)]
    headers = {"content-type": "application/json"}

    async def run() -> list[int]:
        async with server.async_client() as http:
            posts = (http.post(CHAT, content=body, headers=headers) for body in bodies)
            return [response.status_code for response in await asyncio.gather(*posts)]

    with liveness_probe(server) as times:
        statuses = asyncio.run(run())
    p50, p99 = (times[int(len(times) * q)] * 1e3 for q in (0.5, 0.99))
    print(f"/health/live while 64 images decode: p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(times)}")
    assert statuses == [200] * 64
    assert len(times) > 20


async def _load(server: LiveServe, count: int, first_seed: int) -> list[httpx.Response]:
    async with server.async_client() as http:

        async def one(i: int) -> httpx.Response:
            await asyncio.sleep(0.02 * i)
            body = ask(noise(first_seed + i, 600, 400), "What?", max_tokens=32, ignore_eos=True)
            return await http.post(CHAT, json=body | {"stream": bool(i % 2)})

        return list(await asyncio.gather(*(one(i) for i in range(count))))


def _ending(response: httpx.Response) -> str:
    """ "answer", or the code of an error object."""
    if response.headers["content-type"].startswith("application/json"):
        value = response.json()
        return str(value["error"]["code"]) if "error" in value else "answer"
    events = response.text.strip().split("\n\n")
    if events[-1] == "data: [DONE]":
        return "answer"
    return str(json.loads(events[-1].removeprefix("data: "))["error"]["code"])


def test_engine_killed_under_load_ends_streams_and_comes_back(tmp_path: Path) -> None:
    """S8 and issue 4 item 2: every request ends with an answer or an error object."""
    with vlm_serve(tmp_path) as live:

        async def run() -> tuple[list[httpx.Response], list[str]]:
            body = ask(noise(999, 600, 400), "What?", max_tokens=300, ignore_eos=True) | {"stream": True}
            load = asyncio.create_task(_load(live, 24, 1000))
            async with live.async_client() as http, http.stream("POST", CHAT, json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)  # it is being answered
                (engine,) = live.children("vlm.engine_main")
                engine.kill()
                read = [line async for line in lines if line]
            return await load, read

        responses, read = asyncio.run(run())
        assert json.loads(read[-1].removeprefix("data: "))["error"]["code"] == "engine_died"
        endings = {_ending(response) for response in responses}
        assert endings <= {"answer", "engine_died", "engine_unavailable"}
        print(f"ready again after {live.wait_ready():.1f} s")
        assert {_ending(response) for response in asyncio.run(_load(live, 4, 2000))} == {"answer"}


def test_decoder_killed_under_load_loses_nothing(tmp_path: Path) -> None:
    """Issue 4: kill -9 of a decode process."""
    with vlm_serve(tmp_path) as live:

        async def run() -> list[httpx.Response]:
            load = asyncio.create_task(_load(live, 24, 3000))
            await asyncio.sleep(0.2)
            live.children("workers.local.decode_process")[0].kill()
            return await load

        endings = [_ending(response) for response in asyncio.run(run())]
        assert endings == ["answer"] * 24
        assert len(live.children("workers.local.decode_process")) == 2


@pytest.mark.redis
def test_redis_away_for_seconds_loses_nothing(tmp_path: Path, redis_server: RedisServer) -> None:
    """Issue 4: Redis stopped for 5 s and started again under load."""
    with celery_worker(redis_server.url, concurrency=2), vlm_serve(tmp_path, broker=redis_server.url) as live:

        async def run() -> list[httpx.Response]:
            load = asyncio.create_task(_load(live, 16, 4000))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(redis_server.stop)
            await asyncio.sleep(5)
            await asyncio.to_thread(redis_server.start)
            return await load

        assert [_ending(response) for response in asyncio.run(run())] == ["answer"] * 16


def test_base64_of_every_format_is_read(server: LiveServe) -> None:
    with server.client() as http:
        for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
            url = "data:image/any;base64," + base64.b64encode(noise(5, 96, 64, form)).decode()
            body = ask({"type": "image_url", "image_url": {"url": url}}, "What?", max_tokens=2)
            assert http.post(CHAT, json=body).status_code == 200, form


def test_start_errors_are_one_line_and_a_code(tmp_path: Path) -> None:
    """No traceback for what a user can mend."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, words in (
            (["--model", str(tmp_path / "none")], "no folder is at"),
            (["--host", "0.0.0.0"], "no keys are set"),
            (["--port", port], "can't listen"),
        ):
            command = [sys.executable, "-m", "vlm.cli.main", "serve", *options]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2 and words in done.stderr.splitlines()[-1], done.stderr
            assert "Traceback" not in done.stderr and done.stdout == ""
