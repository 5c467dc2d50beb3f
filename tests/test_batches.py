"""/v1/batches with the official client, and its runner against kills, clocks and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from celery_worker import celery_worker
from fake_engine_client import FakeEngine, LiveServer, ask, live_server, png

from vlm.api.batches.batch_check import validate
from vlm.api.batches.batch_rows import count_lines
from vlm.api.batches.batch_runner import WINDOW
from vlm.api.guard.auth import KeyRing
from vlm.api.guard.keys import ApiKey
from vlm.config import ServeConfig
from workers.cluster.node.preprocess_celery import CeleryPreprocess

CHAT = "/v1/chat/completions"


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def server(data_dir: Path) -> Iterator[LiveServer]:
    with live_server(config=ServeConfig(data_dir=str(data_dir))) as running:
        yield running


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    http = httpx.Client(trust_env=False, timeout=30)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=http)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def line(custom_id: Any, *content: Any, **changes: Any) -> str:
    body = ask(*(content or (png(), "What?")), model="vlm-default")
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes)


def upload(client: openai.OpenAI, lines: list[str]) -> str:
    content = "\n".join(lines).encode() + b"\n"
    return client.files.create(file=("batch.jsonl", content), purpose="batch").id


def create(client: openai.OpenAI, lines: list[str], **more: Any) -> Any:
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    final = ("completed", "failed", "expired", "cancelled")
    wait_for(lambda: client.batches.retrieve(batch_id).status in final)
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    rows = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == len({row["custom_id"] for row in rows})
    return {row["custom_id"]: row for row in rows}


def test_a_batch_runs_to_its_end_with_the_official_client(client: openai.OpenAI, server: LiveServer) -> None:
    lines = [line(f"row-{number}", png(40 + number, 30), "What?") for number in range(7)]
    made = create(client, lines, metadata={"job": "night"})
    assert made.id.startswith("batch_") and made.object == "batch" and made.endpoint == CHAT
    assert made.status in ("validating", "in_progress", "finalizing", "completed")
    assert made.expires_at == made.created_at + 86_400 and made.metadata == {"job": "night"}
    batch = ended(client, made.id)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 7, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    rows = content(client, batch.output_file_id)
    assert set(rows) == {f"row-{number}" for number in range(7)}
    for row in rows.values():
        assert set(row) == {"id", "custom_id", "response", "error"} and row["error"] is None
        assert row["response"]["status_code"] == 200 and row["response"]["request_id"]
        answer = row["response"]["body"]
        assert answer["object"] == "chat.completion" and answer["service_tier"] == "batch"
        assert answer["choices"][0]["message"]["content"].startswith("I saw 1 images")
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    stored = client.files.retrieve(batch.output_file_id)
    assert stored.purpose == "batch_output" and stored.filename == f"{batch.id}_output.jsonl"
    assert {request.priority for request in server.engine.submitted} == {"batch"}


def test_a_row_means_what_the_request_means(client: openai.OpenAI, server: LiveServer) -> None:
    """users.md D2: a batch row and a request give equal prompts, counts and keys."""
    body = ask(png(300, 200), "What is it?", max_tokens=5, temperature=0.5, seed=7)
    made = create(client, [json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})])
    batch = ended(client, made.id)
    with server.client() as http:
        direct = http.post(CHAT, json=body).json()
    row = content(client, batch.output_file_id)["a"]["response"]["body"]
    assert row["choices"] == direct["choices"]
    assert row["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    of_row, of_request = server.engine.submitted
    assert of_row.prompt == of_request.prompt and of_row.params == of_request.params


def test_one_bad_row_is_its_own_error_and_the_rest_goes_on(client: openai.OpenAI) -> None:
    """users.md B3."""
    bad = {
        "image": line("image", b"no image", "What?"),
        "model": line("model", body=ask("Hi", model="other")),
        "functions": line("functions", body=ask("Hi", functions=[{"name": "f"}])),
        "stream": line("stream", body=ask("Hi", stream=True)),
        "shape": line("shape", body={"messages": "no list"}),
    }
    batch = ended(client, create(client, [line("good"), *bad.values(), line("also good")]).id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
    assert set(content(client, batch.output_file_id)) == {"good", "also good"}
    failed = content(client, batch.error_file_id)
    assert {custom_id: row["error"]["code"] for custom_id, row in failed.items()} == {
        "image": "unsupported_image_format",
        "model": "model_not_found",
        "functions": "unsupported_parameter",
        "stream": "unsupported_parameter",
        "shape": "invalid_value",
    }
    assert failed["model"]["response"]["status_code"] == 404
    assert failed["image"]["response"]["body"]["error"]["param"].startswith("messages[0]")
    assert client.files.retrieve(batch.error_file_id).filename == f"{batch.id}_error.jsonl"


def test_a_file_that_is_no_batch_fails_with_line_numbers(client: openai.OpenAI, server: LiveServer) -> None:
    lines = [
        line("a"),
        "{not json",
        line(None),
        line("b", method="GET"),
        line("c", url="/v1/embeddings"),
        line("a"),
        line("d", body=[1]),
        "[]",
    ]
    batch = ended(client, create(client, lines).id)
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors.object == "list"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "missing_custom_id"),
        (4, "invalid_method"),
        (5, "invalid_url"),
        (6, "duplicate_custom_id"),
        (7, "missing_body"),
        (8, "invalid_line"),
    ]
    assert not server.engine.submitted


def test_an_empty_file_and_too_many_lines_fail(
    client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ended(client, create(client, ["", "  "]).id)
    assert batch.status == "failed" and [error.code for error in batch.errors.data] == ["empty_file"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line(str(number), "Hi") for number in range(4)))
    monkeypatch.setattr("vlm.api.batches.batch_check.MAX_ROWS", 3)
    total, errors = validate(path, CHAT)
    assert total == 4 and [error.code for error in errors] == ["too_many_lines"]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, None),
        ({"metadata": {"k": "v" * 600}}, 400, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, 400, "metadata"),
    ],
    ids=str,
)
def test_wrong_batches_are_refused_at_once(
    server: LiveServer, client: openai.OpenAI, changes: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"input_file_id": upload(client, [line("a")]), "endpoint": CHAT, "completion_window": "24h"}
    with server.client() as http:
        answered = http.post("/v1/batches", json=body | changes)
    assert answered.status_code == status
    assert answered.json()["error"]["param"] == param
    assert client.batches.list().data == []


def test_a_file_of_another_purpose_is_refused(client: openai.OpenAI) -> None:
    stored = client.files.create(file=("a.jsonl", b"{}\n"), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=stored.id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"


def test_batches_are_listed_newest_first_page_by_page(client: openai.OpenAI) -> None:
    made = [create(client, [line("a", "Hi")]).id for _ in range(5)]
    for batch_id in made:
        ended(client, batch_id)
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:2:-1] and first.has_more
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    rest = client.batches.list(limit=10, after=made[1])
    assert [batch.id for batch in rest.data] == made[:1] and not rest.has_more
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_" + "0" * 32)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_" + "0" * 32)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("../../etc/passwd")


def test_cancelling_ends_and_keeps_what_is_done(client: openai.OpenAI, server: LiveServer) -> None:
    """users.md B2: cancel always ends."""
    lines = [line(str(number), "Hi") for number in range(60)]
    made = create(client, lines)
    wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed >= 3)
    server.engine.hold = asyncio.Event()
    wait_for(lambda: len(server.engine.running) >= 2)
    asked = client.batches.cancel(made.id)
    assert asked.status in ("cancelling", "cancelled")
    batch = ended(client, made.id)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    done = content(client, batch.output_file_id)
    assert 3 <= len(done) == batch.request_counts.completed < 60
    wait_for(lambda: not server.engine.running)
    server.engine.hold = None
    assert client.batches.cancel(made.id).status == "cancelled"
    finished = ended(client, create(client, [line("a", "Hi")]).id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(finished.id)


def test_a_restart_in_the_middle_resumes_by_custom_id(data_dir: Path) -> None:
    """users.md B2. Rows are done once over both servers' lives; a deleted input file does no harm."""
    config = ServeConfig(data_dir=str(data_dir))
    lines = [line(f"row-{number}", f"Question {number}?") for number in range(80)]
    first = FakeEngine()
    with live_server(first, config) as server, client_of(server) as client:
        made = create(client, lines)
        wait_for(lambda: client.batches.retrieve(made.id).request_counts.completed >= 5)
        first.hold = asyncio.Event()
        client.files.delete(made.input_file_id)
        before = client.batches.retrieve(made.id).request_counts.completed
    assert before < 80
    second = FakeEngine()
    with live_server(second, config) as server, client_of(server) as client:
        batch = ended(client, made.id)
        assert batch.status == "completed" and batch.request_counts.completed == 80
        assert set(content(client, batch.output_file_id)) == {f"row-{number}" for number in range(80)}
    assert before <= 80 - len(second.submitted) <= len(first.submitted)


def test_batches_are_private_to_their_key(data_dir: Path) -> None:
    import hashlib

    hashes = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("key-a", "key-b")}
    keys = KeyRing([ApiKey(key, digest, key) for key, digest in hashes.items()])
    config = ServeConfig(data_dir=str(data_dir))
    with (
        live_server(config=config, keys=keys) as server,
        client_of(server, "key-a") as ours,
        client_of(server, "key-b") as theirs,
    ):
        batch = ended(ours, create(ours, [line("a", "Hi")]).id)
        assert batch.status == "completed"
        assert {request.namespace for request in server.engine.submitted} == {"key-a"}
        assert list(theirs.batches.list()) == []
        for attempt in (
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.files.content(batch.output_file_id),
            lambda: create_from(theirs, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert httpx.get(f"{server.url}/v1/batches", trust_env=False).status_code == 401


def create_from(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


def test_rows_wait_out_an_engine_that_is_down(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.ready = False
    made = create(client, [line(str(number), "Hi") for number in range(3)])
    wait_for(lambda: client.batches.retrieve(made.id).status == "in_progress")
    time.sleep(0.3)
    assert client.batches.retrieve(made.id).request_counts.failed == 0
    server.engine.ready = True
    batch = ended(client, made.id)
    assert batch.status == "completed" and batch.request_counts.completed == 3


def test_a_row_that_kills_the_engine_again_and_again_is_given_up(
    client: openai.OpenAI, server: LiveServer
) -> None:
    server.engine.fail_with = ("engine_died", "The engine stopped.")
    batch = ended(client, create(client, [line("poison", "Hi")]).id)
    assert batch.status == "completed" and batch.request_counts.failed == 1
    row = content(client, batch.error_file_id)["poison"]
    assert row["error"]["code"] == "engine_died" and row["response"]["status_code"] == 503
    assert len(server.engine.submitted) == 3


def test_interactive_requests_are_answered_while_a_batch_runs(
    client: openai.OpenAI, server: LiveServer
) -> None:
    server.engine.token_delay_s = 0.01
    made = create(client, [line(str(number), "Hi") for number in range(200)])
    wait_for(lambda: len(server.engine.running) >= 8)
    with server.client() as http:
        for _ in range(3):
            assert http.post(CHAT, json=ask("Hello?")).status_code == 200
        assert http.get("/health/live").status_code == 200
    assert client.batches.retrieve(made.id).status == "in_progress"
    client.batches.cancel(made.id)
    assert ended(client, made.id).status == "cancelled"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(data_dir: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent)))}
    command = [sys.executable, str(tests / "batch_server_child.py"), str(data_dir), str(port), str(log)]
    process = subprocess.Popen(command, env=environment, cwd=data_dir)

    def answers() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health/live", trust_env=False).status_code == 200
        return False

    wait_for(answers, 60.0)
    return process


def at_least(path: Path, num_lines: int) -> bool:
    return count_lines(path) >= num_lines


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_and_does_no_finished_row_again(tmp_path: Path) -> None:
    """users.md B1 and B2, with SIGKILL."""
    port, count = free_port(), 150
    logs = [tmp_path / f"log{life}" for life in range(3)]
    output = tmp_path / "none"
    with (
        httpx.Client(trust_env=False, timeout=30) as http,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", http_client=http) as client,
    ):
        for log in logs[:2]:
            process = start_server(tmp_path, port, log)
            try:
                if log == logs[0]:
                    made = create(client, [line(str(n), png(20 + n, 20), "What?") for n in range(count)])
                    output = next((tmp_path / "batches").glob(f"*/{made.id}")) / "output.jsonl"
                wait_for(partial(at_least, output, count_lines(output) + 20))
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
            assert count_lines(output) < count
        process = start_server(tmp_path, port, logs[2])
        try:
            batch = ended(client, made.id)
            assert (batch.status, batch.request_counts.completed) == ("completed", count)
            assert set(content(client, batch.output_file_id)) == {str(n) for n in range(count)}
        finally:
            process.kill()
            process.wait(10)
    submitted = [log.read_text().split() for log in logs]
    assert len(set().union(*submitted)) == count
    assert sum(map(len, submitted)) <= count + 2 * WINDOW


@pytest.mark.redis
@pytest.mark.slow
def test_a_batch_runs_the_same_through_celery_workers(data_dir: Path, redis_url: str) -> None:
    lines = [line(f"row-{number}", png(40 + number, 30), "What?") for number in range(12)]
    lines += [line("bad", b"no image", "What?"), line("cut", png(50, 50)[:-60], "What?")]
    config = ServeConfig(data_dir=str(data_dir))
    found = []
    with celery_worker(redis_url):
        for stage in (None, CeleryPreprocess(redis_url, redis_url)):
            with live_server(config=config, preprocess=stage) as server, client_of(server) as client:
                batch = ended(client, create(client, lines).id)
                answers = content(client, batch.output_file_id)
                texts = {key: row["response"]["body"]["choices"] for key, row in answers.items()}
                failed = content(client, batch.error_file_id)
                codes = {key: row["error"]["code"] for key, row in failed.items()}
                found.append((texts, codes))
    assert found[0] == found[1] and len(found[0][0]) == 12
    assert found[0][1] == {"bad": "unsupported_image_format", "cut": "invalid_image"}
