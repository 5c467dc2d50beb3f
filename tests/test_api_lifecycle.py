"""Clients that leave, engines that die, servers that stop, and a loop that stays responsive meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, live_server, make_pipeline, png

from preprocess.types import Tiles
from vlm.api.app import create_app
from vlm.api.server import DrainingServer, make_server
from vlm.config import ServeConfig
from workers.local.preprocess_inline import InlinePreprocess

CHAT = "/v1/chat/completions"


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def send_raw(server: LiveServer, data: bytes, content_length: int | None = None) -> socket.socket:
    """A request whose connection the caller closes when it likes."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    lines = (
        f"POST {CHAT} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data) if content_length is None else content_length}",
    )
    connection.sendall("\r\n".join((*lines, "", "")).encode() + data)
    return connection


def send_chat(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    return send_raw(server, json.dumps(body).encode())


class SlowPreprocess(InlinePreprocess):
    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0

    async def tiles(self, *args: Any, **options: Any) -> Tiles:
        self.started += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_decoding_frees_everything(stream: bool) -> None:
    """S4: in mid-decode, streaming or not."""
    with live_server(FakeEngine(token_delay_s=0.05, answer="word " * 2000)) as running:
        connection = send_chat(running, ask("Hi", stream=stream, max_tokens=2000))
        wait_for(lambda: bool(running.engine.running))
        if stream:
            assert b"200 OK" in connection.recv(100)
        connection.close()
        wait_for(lambda: not running.engine.running)
        wait_for(lambda: running.service.admission.num_active == 0)
        assert len(running.engine.cancelled) == 1
        wait_for(lambda: running.service.body_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_queued_frees_everything(stream: bool) -> None:
    """S4: before the first token."""
    with live_server(FakeEngine(hold=asyncio.Event())) as running:
        connection = send_chat(running, ask("Hi", stream=stream))
        wait_for(lambda: bool(running.engine.running))
        assert running.service.admission.num_waiting() == 1
        connection.close()
        wait_for(lambda: running.service.admission.num_active == 0)
        assert len(running.engine.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_its_image_is_decoded_stops_the_decoding(stream: bool) -> None:
    """S4: while preprocessing."""
    stage = SlowPreprocess()
    with live_server(preprocess=stage) as running:
        connection = send_chat(running, ask(png(), "What?", stream=stream))
        wait_for(lambda: stage.started == 1)
        connection.close()
        wait_for(lambda: stage.cancelled == 1)
        wait_for(lambda: running.service.admission.decoded_bytes == 0)


def test_client_that_leaves_in_mid_upload_is_forgotten() -> None:
    with live_server() as running:
        connection = send_raw(running, b'{"messages": [', 100_000)
        wait_for(lambda: running.service.body_bytes > 0)
        connection.close()
        wait_for(lambda: running.service.body_bytes == 0)
        with running.client() as http:
            assert http.post(CHAT, json=ask("Hi")).status_code == 200


def test_body_that_never_ends_times_out() -> None:
    with (
        live_server(config=ServeConfig(body_timeout_s=0.3)) as running,
        send_raw(running, b"{", 99) as connection,
    ):
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_readiness_follows_the_engine_and_liveness_does_not() -> None:
    """S8."""
    with live_server() as running, running.client() as http:
        assert http.get("/health/ready").status_code == http.get("/health").status_code == 200
        running.engine.ready = False
        assert http.get("/health/ready").status_code == http.get("/health").status_code == 503
        assert http.get("/health/live").status_code == 200
        refused = http.post(CHAT, json=ask("Hi"))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert "vlm_engine_ready 0.0" in http.get("/metrics").text
        running.engine.ready = True
        assert http.post(CHAT, json=ask("Hi")).status_code == 200


def test_engine_that_dies_ends_every_stream_with_an_error_object() -> None:
    with live_server(FakeEngine(token_delay_s=0.01, answer="word " * 1000)) as running:

        async def run() -> list[tuple[int, str]]:
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=30) as http:
                bodies = [ask("Hi", stream=bool(i % 2), max_tokens=900) for i in range(6)]
                tasks = [asyncio.create_task(http.post(CHAT, json=body)) for body in bodies]
                while len(running.engine.running) < 6:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                running.loop.call_soon_threadsafe(running.engine.die)
                return [(r.status_code, r.text) for r in await asyncio.gather(*tasks)]

        for index, (status, text) in enumerate(asyncio.run(run())):
            assert status == (200 if index % 2 else 503)
            last = text.strip().split("\n\n")[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "engine_died"


def test_loop_answers_health_while_large_bodies_are_parsed() -> None:
    """S1, API side: 20 MB bodies are parsed elsewhere; 40 probes meanwhile all come back quickly."""
    with live_server() as running:
        body = json.dumps(ask(b"\x89PNG\r\n\x1a\n" + bytes(19 << 20), "What?")).encode()
        done = threading.Event()
        statuses: list[int] = []

        def load() -> None:
            with running.client() as http:
                for _ in range(3):
                    answered = http.post(CHAT, content=body, headers={"content-type": "application/json"})
                    statuses.append(answered.status_code)
            done.set()

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        probes = 0
        with running.client() as http:
            while not done.is_set():
                assert http.get("/health/live").status_code == 200
                probes += 1
        for thread in threads:
            thread.join()
        assert statuses == [400] * 6
        assert probes > 20


class Stoppable:
    """The real server, in a thread, with its real way to stop."""

    def __init__(self, engine: FakeEngine, config: ServeConfig) -> None:
        self.engine = engine
        self.app = create_app(make_pipeline(engine), config)
        self.server: DrainingServer = make_server(self.app, config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: bool(self.server.started and self.server.servers))
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def signal(self) -> None:
        self.server.handle_exit(15, None)


def collect(url: str, into: list[str], **settings: Any) -> threading.Thread:
    def run() -> None:
        with httpx.Client(trust_env=False, timeout=30) as http:
            into.append(http.post(url + CHAT, json=ask("Hi", stream=True, **settings)).text)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_shutdown_drains_running_streams_and_refuses_new_work() -> None:
    stopping = Stoppable(FakeEngine(token_delay_s=0.05), ServeConfig(port=0, drain_s=20))
    texts: list[str] = []
    with httpx.Client(base_url=stopping.url, trust_env=False) as http:
        assert http.get("/health/ready").status_code == 200
        reader = collect(stopping.url, texts)
        wait_for(lambda: bool(stopping.engine.running))
        stopping.signal()
        wait_for(lambda: stopping.app.state.service.admission.draining)
        refused = http.post(CHAT, json=ask("Hi"))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert http.get("/health/ready").status_code == 503
        assert http.get("/health/live").status_code == 200
    reader.join(20)
    stopping.thread.join(20)
    assert texts[0].rstrip().endswith("data: [DONE]")
    assert not stopping.thread.is_alive()


def test_streams_that_outlive_the_drain_deadline_end_with_an_error_object() -> None:
    stopping = Stoppable(
        FakeEngine(token_delay_s=0.05, answer="word " * 2000), ServeConfig(port=0, drain_s=0.3)
    )
    texts: list[str] = []
    reader = collect(stopping.url, texts, max_tokens=1500)
    wait_for(lambda: bool(stopping.engine.running))
    stopping.signal()
    reader.join(20)
    stopping.thread.join(20)
    assert json.loads(texts[0].rstrip().split("data: ")[-1])["error"]["code"] == "shutting_down"
    assert not stopping.thread.is_alive()


def test_second_signal_ends_at_once() -> None:
    stopping = Stoppable(
        FakeEngine(token_delay_s=0.05, answer="word " * 2000), ServeConfig(port=0, drain_s=600)
    )
    connection = send_chat(
        LiveServer(stopping.app, stopping.engine, stopping.url, None, stopping.server),  # type: ignore[arg-type]
        ask("Hi", stream=True, max_tokens=1500),
    )
    wait_for(lambda: bool(stopping.engine.running))
    stopping.signal()
    stopping.signal()
    stopping.thread.join(20)
    assert not stopping.thread.is_alive()
    connection.close()
