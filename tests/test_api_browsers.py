"""What browsers ask before a page of another site may talk to the service, and what such a page sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from browser import CHROMIUM, browser, needs_chromium
from fake_engine_client import FakeEngine, LiveServer, ask, live_server
from small_servers import serving

from vlm.config import ServeConfig

CHAT = "/v1/chat/completions"
SITE = "https://app.test"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(config=ServeConfig(cors_origins=f"{SITE}, http://localhost:5173")) as running:
        yield running


def official_headers() -> dict[str, str]:
    """What the official client sends beside what browsers set themselves."""
    sent: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers)
        return httpx.Response(500)

    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as http,
        openai.OpenAI(
            base_url="http://x/v1",
            api_key="k",
            organization="o",
            project="p",
            max_retries=0,
            http_client=http,
            default_headers={"x-stainless-helper-method": "stream"},
        ) as official,
        pytest.raises(openai.InternalServerError),
    ):
        official.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    own = ("host", "connection", "content-length", "accept-encoding", "user-agent")
    return {name: value for name, value in sent[0].items() if name not in own}


def preflight(server: LiveServer, origin: str = SITE, **more: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **more}
    with server.client() as http:
        return http.options(CHAT, headers=asked)


def test_the_preflight_of_the_official_client_passes(server: LiveServer) -> None:
    names = sorted(official_headers())
    assert "authorization" in names and sum(name.startswith("x-stainless-") for name in names) >= 7
    answered = preflight(server, **{"access-control-request-headers": ", ".join(names)})
    assert answered.status_code == 200 and answered.headers["access-control-allow-origin"] == SITE
    allowed = answered.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(allowed) >= set(names)


def test_a_preflight_for_a_private_network_passes_for_origins_that_are_named(server: LiveServer) -> None:
    wanted = {"access-control-request-private-network": "true"}
    answered = preflight(server, **wanted)
    assert answered.status_code == 200 and answered.headers["access-control-allow-private-network"] == "true"
    refused = preflight(server, "https://other.test", **wanted)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_a_page_sees_the_headers_that_clients_act_on(server: LiveServer) -> None:
    with server.client() as http:
        for answered in (
            http.get("/v1/models", headers={"origin": SITE}),
            http.get("/", headers={"origin": SITE}),
        ):
            exposed = answered.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed)


def test_a_server_under_a_path_is_the_same_server(tmp_path: Path) -> None:
    """With the path or without, and so are its limits, its metrics and its document."""
    config = ServeConfig(root_path="/a/vlm", max_request_mb=1, max_file_mb=4, data_dir=str(tmp_path))
    with live_server(config=config) as running, running.client() as http:
        for prefix in ("", "/a/vlm"):
            assert http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "vlm-default"
            large = {"file": ("a", b"x" * (2 << 20))}
            assert (
                http.post(f"{prefix}/v1/files", data={"purpose": "user_data"}, files=large).status_code == 200
            )
            assert http.post(f"{prefix}{CHAT}", json=ask("x" * (2 << 20))).status_code == 413
            moved = http.get(f"{prefix}/v1/models/").headers["location"]
            assert moved == f"{running.url}/a/vlm/v1/models"
            assert http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/a/vlm"}]
        assert http.get("/a/vlm").headers["location"] == "/a/vlm/"
        assert http.get("/a/vlmore").status_code == 404
        assert 'route="/v1/models",status="200"} 2.0' in http.get("/metrics").text


class _Blank(BaseHTTPRequestHandler):
    """A site with one blank page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>elsewhere</title>")

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.mark.browser
@pytest.mark.slow
@needs_chromium
def test_a_page_of_another_origin_asks_as_the_official_client_does() -> None:
    """In the real browser, which hides what a server does not expose."""
    assert CHROMIUM is not None
    engine = FakeEngine()
    with (
        serving(_Blank) as port,
        live_server(engine, ServeConfig(cors_origins=f"http://127.0.0.1:{port}")) as running,
    ):
        sent = json.dumps({"method": "POST", "headers": official_headers(), "body": json.dumps(ask("Hi"))})
        seen = """async r => {
            const header = name => r.headers.get(name);
            return [r.status, header("x-request-id"), header("retry-after"), await r.text()];
        }"""
        fetching = f"fetch({json.dumps(running.url + CHAT)}, {sent}).then({seen})"
        with browser(CHROMIUM) as page:
            page.go(f"http://127.0.0.1:{port}")
            page.wait("document.title === 'elsewhere'")
            status, request_id, _, body = page.js(fetching)
            assert status == 200 and request_id and "I saw 0 images" in body
            engine.ready = False
            status, request_id, retry_after, body = page.js(fetching)
            assert status == 503 and request_id and int(retry_after) >= 1
