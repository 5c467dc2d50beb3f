"""What a request may be and hold: parsing of images, caps that are checked before work, admission."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, data_uri, image_part, live_server, png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from waiting import wait_for

from llm.request import Failed
from preprocess.limits import ImageLimits
from vlm.api.guard.admission import Admission, CompletionRate
from vlm.config import MEBIBYTE, ServeConfig
from vlm.requests.errors import ApiError
from vlm.requests.media import Inline, Stored, decode_base64, parse_url

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def with_url(url: Any) -> dict[str, Any]:
    return ask({"type": "image_url", "image_url": {"url": url}}, "What?")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png,iVBORw0KGgo=", "data_uri_without_base64"),  # P1
        ("data:image/png;base64;iVBORw0KGgo=", "data_uri_without_comma"),  # P2
        ("data:image/png;base64,@@@@", "invalid_base64"),  # P2
        ("data:image/png;base64,abc", "invalid_base64"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "invalid_base64"),
        ("data:text/plain;base64,aGVsbG8=", "data_uri_media_type"),  # P2
        ("data:application/pdf;base64,aGVsbG8=", "data_uri_media_type"),  # P5
        ("data:image/png;base64,", "empty_image"),
        ("", "empty_image_url"),  # P3
        ("   ", "empty_image_url"),
        ("iVBORw0KGgoAAAANSUhEUg==", "invalid_image_url"),  # P3: bare base64
        ("img-123", "invalid_image_id"),
        ("img-" + "0" * 32, "image_not_found"),
        ("https://example.com/a.png", "url_fetching_disabled"),
        ("HTTP://example.com/a.png", "url_fetching_disabled"),
        ("file:///etc/passwd", "unsupported_url_scheme"),  # F4
        ("ftp://example.com/a.png", "unsupported_url_scheme"),
        ("/etc/passwd", "invalid_image_url"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "unsupported_image_format"),  # D6
    ],
)
def test_each_wrong_url_has_a_code_of_its_own(client: httpx.Client, url: str, code: str) -> None:
    """P1, P2, P3, F4, D6."""
    answered = client.post(CHAT, json=with_url(url))
    error = answered.json()["error"]
    assert answered.status_code == (404 if code == "image_not_found" else 400)
    assert (error["code"], error["param"]) == (code, "messages[0].content[0].image_url.url")
    assert answered.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_image_is_named_by_its_place(client: httpx.Client, stream: bool) -> None:
    """D7: its header is whole, so the pixels tell; the second message's first image is the one."""
    whole, other = png(90, 60, (1, 2, 3)), png(800, 600, (4, 5, stream))
    body = ask(whole, "What?")
    body["messages"].append({"role": "assistant", "content": "A square."})
    body["messages"] += ask(other[: len(other) // 2], whole, "And now?")["messages"]
    error = client.post(CHAT, json={**body, "stream": stream}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_image", "messages[2].content[0].image_url.url")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", "root ::= [a-z]"),
        ("chat_template", "{{ messages }}"),
        ("continue_final_message", True),
    ],
)
def test_what_other_servers_would_honour_is_refused_and_its_default_taken(
    client: httpx.Client, name: str, value: Any
) -> None:
    answered = client.post(CHAT, json=ask("Hi", **{name: value}))
    assert answered.status_code == 400 and answered.json()["error"]["param"] == name
    assert client.post(CHAT, json=ask("Hi", **{name: None})).status_code == 200


def test_messages_of_wrong_data_uris_differ(client: httpx.Client) -> None:
    """P2: three distinct messages."""
    urls = ["data:image/png;base64,@@@@", "data:image/png;base64", "data:text/plain;base64,aGVsbG8="]
    messages = {client.post(CHAT, json=with_url(url)).json()["error"]["message"] for url in urls}
    assert len(messages) == 3


def test_image_url_as_a_plain_string_is_taken(client: httpx.Client) -> None:
    """P3: accepted and documented."""
    body = ask({"type": "image_url", "image_url": data_uri(png())}, "What?")
    assert client.post(CHAT, json=body).status_code == 200


def test_base64_with_line_breaks_is_taken(client: httpx.Client) -> None:
    head, _, payload = data_uri(png()).partition(",")
    broken = "\r\n".join(payload[i : i + 76] for i in range(0, len(payload), 76))
    assert client.post(CHAT, json=with_url(f"{head},{broken}")).status_code == 200


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=5000))
def test_base64_round_trip(data: bytes) -> None:
    source = parse_url(data_uri(data), "p", allow_urls=False)
    assert isinstance(source, Inline) and decode_base64(source.base64, "p") == data


@settings(deadline=None, max_examples=200)
@given(url=st.text(max_size=80) | st.from_regex(r"(data|img|http|file)[:\-/;,a-z0-9]{0,40}", fullmatch=True))
def test_any_url_is_a_source_or_a_400(url: str) -> None:
    try:
        source = parse_url(url, "p", allow_urls=False)
    except ApiError as error:
        assert error.status_code == 400 and error.param == "p"
    else:
        assert isinstance(source, Inline | Stored)


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "input_file", "refusal", "x" * 60, "image"])
def test_unsupported_part_is_named_by_its_place(client: httpx.Client, kind: str) -> None:
    """P4, P5."""
    answered = client.post(CHAT, json=ask("a", "b", {"type": kind, kind: {"data": "x"}}))
    assert answered.status_code == 400
    assert answered.json()["error"]["param"] == "messages[0].content[2].type"
    assert kind not in answered.json()["error"]["message"] or kind in ("image", "file")


def test_too_many_images_are_refused_before_any_is_decoded(server: LiveServer, client: httpx.Client) -> None:
    """P6: history counts too, and the check comes before base64 is looked at."""
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}] * 9
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    submitted = len(server.engine.submitted)
    answered = client.post(CHAT, json={"messages": [*messages, *messages]})
    assert answered.status_code == 400 and answered.json()["error"]["code"] == "too_many_images"
    assert len(server.engine.submitted) == submitted


def test_context_length_exceeded_states_text_and_image_tokens(client: httpx.Client) -> None:
    """P7."""
    answered = client.post(CHAT, json=ask(png(), "word " * 3000))
    error = answered.json()["error"]
    assert answered.status_code == 400 and error["code"] == "context_length_exceeded"
    count = client.post("/v1/tokenize", json=ask(png(), "word " * 10)).json()
    assert f"{count['image_tokens']} of images" in error["message"] and "of text" in error["message"]


def test_text_that_can_not_fit_is_refused_before_it_is_tokenised(client: httpx.Client) -> None:
    """P7, S1: tokenising a megabyte of text would hold the interpreter for seconds."""
    answered = client.post(CHAT, json=ask(png(), "word " * 190_000))
    error = answered.json()["error"]
    assert answered.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "at least" in error["message"] and "of images" in error["message"]


def one_bit_png(side: int) -> bytes:
    """A bomb: tiny on the wire, side x side pixels decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + b"\0" * ((side + 7) // 8)
    pixels = zlib.compress(row * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_from_its_header(client: httpx.Client) -> None:
    """D11: memory stays flat."""
    bomb = one_bit_png(13_400)
    assert len(bomb) < 64_000
    tracemalloc.start()
    try:
        answered = client.post(CHAT, json=ask(bomb, "What?"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answered.status_code == 400 and answered.json()["error"]["code"] == "image_too_large"
    assert peak < 20 * MEBIBYTE


def test_pixels_are_capped_in_sum_too() -> None:
    """D11: the cap also sums over a request's images."""
    limits = ImageLimits(max_pixels=200_000, max_request_pixels=300_000)
    with live_server(limits=limits) as running, running.client() as http:
        assert http.post(CHAT, json=ask(png(400, 400), "What?")).status_code == 200
        answered = http.post(CHAT, json=ask(png(400, 400), png(400, 399), "What?"))
        assert answered.status_code == 400 and answered.json()["error"]["code"] == "images_too_large"


def test_request_that_never_fits_the_cache_is_a_400() -> None:
    """P9: the engine's refusal comes back as the client's error, not as a hang."""
    engine = FakeEngine()

    async def refuse(request: Any) -> Any:
        yield Failed(request.id, "kv_capacity_exceeded", "10 tokens need 20 blocks; there are 10")

    engine.submit = refuse  # type: ignore[method-assign]
    with live_server(engine) as running, running.client() as http:
        for stream in (False, True):
            answered = http.post(CHAT, json=ask("Hi", stream=stream))
            assert answered.status_code == 400
            assert answered.json()["error"]["code"] == "kv_capacity_exceeded"


def test_every_way_in_gives_equal_tokens_and_keys(server: LiveServer, client: httpx.Client) -> None:
    """D2 and issue item 4: data: URI, stored image, tokenize and estimate agree."""
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.radial_gradient("L").resize((240, 160)).convert("RGB").save(buffer, "JPEG", exif=exif)
    data = buffer.getvalue()
    stored = client.post("/v1/images", files={"file": ("a.jpg", data)}).json()
    assert (stored["width"], stored["height"]) == (160, 240)  # D1
    by_id = {"type": "image_url", "image_url": {"url": stored["id"]}}
    usages, keys = [], []
    for part in (image_part(data), by_id, {"type": "image_url", "image_url": data_uri(data, "image/jpeg")}):
        answered = client.post(CHAT, json=ask(part, "What?"))
        usages.append(answered.json()["usage"]["prompt_tokens"])
        keys.append(server.engine.submitted[-1].prompt.spans[0].key)
        counted = client.post("/v1/tokenize", json=ask(part, "What?")).json()
        estimated = client.post("/v1/estimate", json=ask(part, "What?")).json()
        assert counted["prompt_tokens"] == estimated["prompt_tokens"] == usages[-1]
        assert counted["image_tokens"] == stored["image_tokens"] == estimated["image_tokens"]
    assert len(set(usages)) == len(set(keys)) == 1


def test_estimate_runs_nothing_and_learns_from_what_ran() -> None:
    with live_server() as running, running.client() as http:
        body = ask(png(300, 300), "What?")
        first = http.post("/v1/estimate", json=body).json()
        assert running.engine.submitted == [] and running.engine.num_wants == 0
        assert first["expected_ttft_ms"] == {"cold": None, "warm": None}
        assert first["kv_bytes"] > 0 and first["images"][0]["grid"]["thumbnail"] is True
        http.post(CHAT, json=body)
        http.post(CHAT, json=ask(png(301, 300), "What?"))
        later = http.post("/v1/estimate", json=body).json()["expected_ttft_ms"]
        assert later["warm"] is not None and later["cold"] is not None and later["cold"] > later["warm"] > 0


def test_tokenize_takes_a_text_or_a_chat(client: httpx.Client) -> None:
    counted = client.post("/v1/tokenize", json={"text": "Hello <image> there"}).json()
    assert counted["prompt_tokens"] == len(counted["token_ids"]) > 3
    for body in ({}, {"text": "a", "messages": [{"role": "user", "content": "a"}]}):
        assert client.post("/v1/tokenize", json=body).status_code == 400


def test_body_cap_counts_while_reading(server: LiveServer) -> None:
    """Chunked bodies carry no length: 413 comes from counting."""
    config = ServeConfig(max_request_mb=1)

    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (64 << 10)

    with live_server(config=config) as running, running.client() as http:
        headers = {"content-type": "application/json"}
        answered = http.post(CHAT, content=endless(), headers=headers)
        assert answered.status_code == 413 and answered.json()["error"]["code"] == "request_too_large"
        answered = http.post(CHAT, content=b" " * (2 << 20), headers=headers)
        assert answered.status_code == 413
        wait_for(lambda: running.service.body_bytes == 0)
        assert http.post(CHAT, json=ask("Hi")).status_code == 200


def test_bodies_in_flight_are_capped_together() -> None:
    """One client's body is held in the middle; another one is refused while both would be too much, and taken
    when the first has gone. A body alone may be as large as its own cap."""
    config = ServeConfig(max_bodies_mb=1)
    large = json.dumps(ask("Hi") | {"user": "x" * (1 << 20)}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {len(large)}\r\n\r\n"
    )
    with live_server(config=config) as running, running.client() as http:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port)) as held:
            held.sendall(head.encode() + large[: 900 << 10])
            wait_for(lambda: running.service.body_bytes >= 900 << 10)
            small = json.dumps(ask("Hi") | {"user": "x" * (200 << 10)}).encode()
            refused = http.post(CHAT, content=small, headers={"content-type": "application/json"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "bodies_in_flight"
            assert http.post(CHAT, json=ask("Hi")).status_code == 200  # there is room for a short one
        wait_for(lambda: running.service.body_bytes == 0)
        for content in (small, large):
            answered = http.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert answered.status_code in (200, 400) and "in_flight" not in answered.text
            wait_for(lambda: running.service.body_bytes == 0)


def test_image_bytes_are_capped(server: LiveServer) -> None:
    with live_server(limits=ImageLimits(max_bytes=1000)) as running, running.client() as http:
        answered = http.post(CHAT, json=ask(b"\x89PNG\r\n\x1a\n" + b"0" * 5000, "What?"))
        assert answered.status_code == 400 and answered.json()["error"]["code"] == "image_too_large"


def test_decoded_bytes_in_flight_are_capped() -> None:
    """S3: 503 with Retry-After before the images of many clients are decoded at once."""
    engine = FakeEngine(hold=asyncio.Event())
    big = png(1000, 1000)  # 4 MB decoded

    async def run(running: LiveServer) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=30) as http:
            first = asyncio.create_task(http.post(CHAT, json=ask(big, "What?")))
            while not engine.running:
                await asyncio.sleep(0.01)
            refused = await http.post(CHAT, json=ask(png(1000, 999), "What?"))
            small = asyncio.create_task(http.post(CHAT, json=ask(png(10, 10), "What?")))
            running.loop.call_soon_threadsafe(engine.hold.set)  # type: ignore[union-attr]
            return [refused, *(await asyncio.gather(first, small))]

    with live_server(engine, ServeConfig(max_decoded_mb=4)) as running:
        refused, *answered = asyncio.run(run(running))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "images_in_flight"
        assert int(refused.headers["retry-after"]) >= 1
        assert [response.status_code for response in answered] == [200, 200]
        assert running.service.admission.decoded_bytes == 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rate_counts_busy_time_only() -> None:
    clock = Clock()
    rate = CompletionRate(clock)
    for _ in range(20):
        rate.started()
        clock.now += 2.0
        rate.ended(True)
        clock.now += 1000.0  # a quiet time between requests
    measured = rate.measured()
    assert measured is not None
    assert measured == pytest.approx((0.5, 1.0))
    assert rate.expected_s(9) == pytest.approx(20.0)


def test_request_that_misses_its_deadline_is_refused_at_once() -> None:
    """Goodput: refused before work, with the time after which it could have been met."""
    clock = Clock()
    admission = Admission(ServeConfig(), clock)
    for _ in range(10):
        ticket = admission.admit(0, "interactive", 100.0)
        clock.now += 1.0
        ticket.begun()
        ticket.close(completed=True)
    held = [admission.admit(0, "interactive", 100.0) for _ in range(30)]
    with pytest.raises(ApiError) as caught:
        admission.admit(0, "interactive", 10.0)
    assert caught.value.status_code == 503 and caught.value.code == "deadline_unmeetable"
    assert caught.value.retry_after_s == pytest.approx(21.0)
    admission.admit(0, "interactive", 60.0).close(completed=False)
    for ticket in held:
        ticket.close(completed=False)
    assert admission.num_active == 0 and admission.decoded_bytes == 0


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["admit", "begun", "close"]), st.integers(0, 5)), max_size=60)
)
def test_admission_counters_return_to_zero(steps: list[tuple[str, int]]) -> None:
    """C7 for the API's own counters."""
    admission = Admission(ServeConfig(max_queued=4, max_decoded_mb=2))
    tickets = []
    for step, which in steps:
        if step == "admit":
            try:
                tickets.append(admission.admit(which * MEBIBYTE // 2, "interactive", 1e9))
            except ApiError as error:
                assert error.status_code in (429, 503) and error.retry_after_s
        elif tickets:
            ticket = tickets[which % len(tickets)]
            ticket.begun() if step == "begun" else ticket.close(completed=True)
        assert admission.num_waiting() <= 4
    for ticket in tickets:
        ticket.close(completed=False)
    assert (admission.num_active, admission.num_waiting(), admission.decoded_bytes) == (0, 0, 0)
