"""Clients that mean harm or have bad luck: bodies, forms, files, rows of batches and connections."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, live_server
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from vlm.api import server as server_module
from vlm.api.batches import batch_chat
from vlm.api.storage.files import FileStore
from vlm.config import ServeConfig
from vlm.requests.errors import ApiError
from vlm.requests.lines import BadLine, parse_line
from vlm.requests.strict_json import MAX_VALUES, TooManyValues, parse
from workers.contract.stages import deadline_passed, overloaded, unreachable

CHAT = "/v1/chat/completions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(config=ServeConfig(data_dir=str(tmp_path / "data"))) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


# JSON


@pytest.mark.parametrize("value", [b"[]", b"{}", b'""', b"0", b'{"a":0}'])
def test_json_of_too_many_values_is_refused_before_it_takes_memory(value: bytes) -> None:
    text = b'{"x":[' + b",".join([value] * (MAX_VALUES + 1)) + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(TooManyValues):
            parse(text)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(",[{"), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_json_of_few_values_is_what_it_was(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert parse(text.encode()) == value


@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/v1/estimate", "/v1/images", "/v1/batches"])
def test_a_body_of_too_many_values_is_a_400_on_every_route(client: httpx.Client, path: str) -> None:
    body = b'{"tools":[' + b"[]," * MAX_VALUES + b"0]}"
    answered = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answered.status_code == 400 and answered.json()["error"]["code"] == "request_too_complex"


# Forms


@pytest.mark.parametrize("path", ["/v1/files", "/v1/images"])
@pytest.mark.parametrize(
    "charset", ["undefined", "utf-7", "unicode_escape", "idna", "utf-16", '"utf-7"', "x"]
)
def test_a_form_in_a_charset_of_the_clients_choice_is_a_415(
    client: httpx.Client, path: str, charset: str
) -> None:
    """With utf-7 or unicode_escape a name would decode to what no answer could hold, the list included."""
    answered = send_form(client, path, charset, b"+2AA-")
    assert answered.status_code == 415 and answered.json()["error"]["code"] == "unsupported_media_type"
    assert client.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("name", ["résumé.jsonl", "a\tb", "../../x", "x" * 3000, "\u202e", ""])
def test_any_file_name_is_kept_as_a_name(client: httpx.Client, tmp_path: Path, name: str) -> None:
    answered = send_form(client, "/v1/files", "UTF-8", name.encode())
    assert answered.status_code == 200, answered.text
    assert answered.json()["filename"] == (name or "file")[:256]
    assert client.get("/v1/files").json()["data"] == [answered.json()]
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.name.startswith("file-") for path in stored) and len(stored) == 2


def send_form(client: httpx.Client, path: str, charset: str, name: bytes) -> httpx.Response:
    body = b"\r\n".join(
        (
            b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch',
            b'--B\r\ncontent-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\nabc',
            b"--B--\r\n",
        )
    )
    kind = f"multipart/form-data; boundary=B; charset={charset}"
    return client.post(path, content=body, headers={"content-type": kind})


# Files


class SlowSource(io.BytesIO):
    """Is read only once all have begun."""

    def __init__(self, data: bytes, begun: threading.Barrier) -> None:
        super().__init__(data)
        self._begun = begun

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() == 0:
            self._begun.wait(10)
        return super().read(size)


def test_uploads_at_once_share_the_room_that_is_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=250)
    begun = threading.Barrier(2)

    def add(index: int) -> str:
        try:
            return store.add("", str(index), "batch", SlowSource(b"x" * 100, begun)).id
        except ApiError as error:
            return error.code

    with ThreadPoolExecutor(4) as pool:
        results = sorted(pool.map(add, range(4)))
    assert results[2:] == ["file_store_full"] * 2 or results[:2] == ["file_store_full"] * 2
    assert store.total_bytes() == 200
    for file in store.list(""):
        store.delete("", file.id)
    assert store.add("", "a", "batch", io.BytesIO(b"x" * 100)).bytes == 100


def test_a_file_that_vanishes_while_others_are_counted_costs_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=250)
    doomed = store.add("", "a", "batch", io.BytesIO(b"x" * 90))
    glob = Path.glob

    def glob_then_delete(self: Path, pattern: str) -> Iterator[Path]:
        found = list(glob(self, pattern))
        if pattern.endswith(".bin"):
            store.delete("", doomed.id)
        return iter(found)

    monkeypatch.setattr(Path, "glob", glob_then_delete)
    assert store.total_bytes() == 0


def test_content_of_a_file_that_is_just_being_deleted_is_a_404(
    server: LiveServer, client: httpx.Client, tmp_path: Path
) -> None:
    made = send_form(client, "/v1/files", "utf-8", b"a").json()
    (stored,) = tmp_path.rglob("*.bin")
    stored.unlink()
    answered = client.get(f"/v1/files/{made['id']}/content")
    assert answered.status_code == 404 and answered.json()["error"]["code"] == "file_not_found"


# Rows of batches


def row(custom_id: str, **body: Any) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": ask("Hi") | body}
    ).encode()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (row("\ud800"), "missing_custom_id"),
        (row("a", tools=[[]] * MAX_VALUES), "line_too_complex"),
        (b'{"a":' * 5000, "invalid_json_line"),
        (b'{"custom_id": ' + b"9" * 5000 + b"}", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
    ],
)
def test_a_line_that_can_not_be_read_or_named_is_told_as_such(line: bytes, code: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(line)
    assert caught.value.code == code


def test_a_line_after_a_byte_order_mark_is_read() -> None:
    assert parse_line(b"\xef\xbb\xbf" + row("a")).custom_id == "a"


def test_a_row_that_no_request_could_be_is_that_rows_error(client: httpx.Client) -> None:
    """users.md B3: half a character, as cutting an emoji in two leaves it, and numbers that JSON lacks."""
    lines = [
        row("good"),
        row("half", messages=[{"role": "user", "content": "\ud83d"}]),
        row("nan", top_p=float("nan")),
    ]
    batch = run_batch(client, lines)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    failed = client.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    assert {json.loads(line)["custom_id"] for line in failed} == {"half", "nan"}
    assert {json.loads(line)["response"]["status_code"] for line in failed} == {400}


@pytest.mark.parametrize("code", [deadline_passed().code, overloaded().code, unreachable().code])
def test_rows_wait_while_images_wait_for_others(
    server: LiveServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """A full queue in front of the decoders is no row's fault, however often one meets it."""
    monkeypatch.setattr(batch_chat, "FIRST_WAIT_S", 0.02)
    server.engine.fail_with = (code, "Please try again.")
    made = create_batch(client, [row("a")])
    wait_for(lambda: len(server.engine.submitted) > 3)
    server.engine.fail_with = None
    assert end_of(client, made["id"])["request_counts"]["completed"] == 1


def create_batch(client: httpx.Client, lines: list[bytes]) -> dict[str, Any]:
    sent = client.post("/v1/files", files={"file": b"\n".join(lines)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": sent["id"], "endpoint": CHAT, "completion_window": "24h"}
    made: dict[str, Any] = client.post("/v1/batches", json=body).json()
    return made


def end_of(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    def batch() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
        return found

    wait_for(lambda: batch()["status"] in ("completed", "failed"))
    return batch()


def run_batch(client: httpx.Client, lines: list[bytes]) -> dict[str, Any]:
    return end_of(client, create_batch(client, lines)["id"])


def test_batches_that_wait_for_their_turn_hold_no_descriptors(tmp_path: Path) -> None:
    """Else some hundred of them leave none to accept a connection with. The same file is input of all."""
    config = ServeConfig(data_dir=str(tmp_path / "data"))
    with live_server(FakeEngine(ready=False), config=config) as running, running.client() as http:
        first = create_batch(http, [row("a")])
        ids = [first["id"]]
        before = len(os.listdir("/proc/self/fd"))
        body = {"input_file_id": first["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        ids += [http.post("/v1/batches", json=body).json()["id"] for _ in range(25)]
        states = {"in_progress"}
        wait_for(lambda: {http.get(f"/v1/batches/{i}").json()["status"] for i in ids} == states, 30)
        assert len(os.listdir("/proc/self/fd")) - before < 25
        cancelled = ids.pop()
        http.post(f"/v1/batches/{cancelled}/cancel")
        wait_for(lambda: http.get(f"/v1/batches/{cancelled}").json()["status"] == "cancelled")
        running.engine.ready = True
        for batch_id in ids:
            assert end_of(http, batch_id)["request_counts"]["completed"] == 1


# Connections


@pytest.mark.parametrize("sent_before", [b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_headers_that_trickle_end_the_connection_at_every_request(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent_before: bytes
) -> None:
    monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.3)
    with connect(server) as connection:
        if sent_before:
            connection.sendall(sent_before)
            connection.settimeout(10)
            received = b""
            while b"live" not in received:
                received += connection.recv(10_000)
        connection.sendall(b"GET /health/live HTTP/1.1\r\n")
        connection.settimeout(0.05)
        ended = False
        for _ in range(200):
            try:
                connection.sendall(b"x-a: b\r\n")
                ended = connection.recv(100) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            break
        assert ended


def test_a_request_outlives_the_time_for_its_headers(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stops with the headers, also for a request that was sent before the one before it ended."""
    monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.2)
    server.engine.token_delay_s, server.engine.answer = 0.02, "word " * 6
    body = json.dumps(ask("Hi")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with connect(server) as connection:
        connection.settimeout(20)
        connection.sendall(request + request)
        received = b""
        while received.count(b"chat.completion") < 2:
            piece = connection.recv(65536)
            assert piece, received
            received += piece


def connect(server: LiveServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)))
