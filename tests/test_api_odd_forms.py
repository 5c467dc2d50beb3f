"""Requests as clients write them: what is taken though it looks odd, and refusals that say what to do."""

from __future__ import annotations

import base64
import codecs
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine_client import LiveServer, ask, data_uri, live_server, model_spec, png

from vlm.requests.lines import parse_line, to_chat

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def refusal(answered: httpx.Response, status: int) -> dict[str, Any]:
    assert answered.status_code == status, answered.text
    error: dict[str, Any] = answered.json()["error"]
    return error


@pytest.mark.parametrize("empty", ["", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_answer_may_stand_in_the_history(server: LiveServer, empty: Any) -> None:
    """The service itself may have given it; the official client sends a whole message back."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        history: list[Any] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": empty},
            {"role": "user", "content": "And?"},
        ]
        assert official.chat.completions.create(model="vlm-default", messages=history).choices[0].message
    told = server.engine.submitted[-1].prompt
    shown = model_spec().tokenizer.decode(told.token_ids, skip_special=False)
    assert "User: Hi<end_of_utterance>\nAssistant: <end_of_utterance>\nUser: And?<end_of_utterance>" in shown
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": history}}
    messages, _ = to_chat(parse_line(json.dumps(line).encode()), default_max_tokens=8)
    assert [message.content for message in messages] == [("Hi",), ("",), ("And?",)]


def test_an_answer_of_no_text_comes_back_as_it_was_given(server: LiveServer) -> None:
    server.engine.answer = ""
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
            history: list[Any] = [{"role": "user", "content": "Hi"}]
            given = official.chat.completions.create(model="vlm-default", messages=history).choices[0].message
            assert given.content == ""
            history += [given, {"role": "user", "content": "And?"}]
            assert official.chat.completions.create(model="vlm-default", messages=history).choices
    finally:
        server.engine.answer = None


def test_messages_without_anything_in_them_are_refused_by_their_place(client: httpx.Client) -> None:
    for content in ("", None, [{"type": "text", "text": ""}]):
        error = refusal(client.post(CHAT, json={"messages": [{"role": "user", "content": content}]}), 400)
        assert error["param"] == "messages" and "no text and no image" in error["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": []}]}
    error = refusal(client.post(CHAT, json=body), 400)
    assert error["param"] == "messages[1].content" and "empty" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP"])
@pytest.mark.parametrize("path", [CHAT, "/v1/images", "/v1/files"])
def test_a_compressed_body_is_a_415_that_says_so(client: httpx.Client, path: str, encoding: str) -> None:
    body = gzip.compress(json.dumps(ask("Hi")).encode())
    answered = client.post(path, content=body, headers={**JSON, "content-encoding": encoding})
    error = refusal(answered, 415)
    assert error["code"] == "unsupported_content_encoding" and "content-encoding" in error["message"]
    assert answered.headers["accept-encoding"] == "identity"
    plain = client.post(CHAT, json=ask("Hi"), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_a_byte_order_mark_before_json_is_passed_over(client: httpx.Client) -> None:
    for path, body in ((CHAT, ask("Hi")), ("/v1/images", {"image": data_uri(png())})):
        marked = codecs.BOM_UTF8 + json.dumps(body).encode()
        assert client.post(path, content=marked, headers=JSON).status_code == 200
    for wrong in (json.dumps(ask("Hi")).encode("utf-16"), b"{", codecs.BOM_UTF8 * 2 + b"{}"):
        error = refusal(client.post(CHAT, content=wrong, headers=JSON), 400)
        assert error["code"] == "invalid_json" and "UTF-8" in error["message"]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/v1/estimate", "/v1/batches"])
def test_json_under_another_content_type_is_a_415_that_names_the_right_one(
    client: httpx.Client, path: str, kind: str | None
) -> None:
    """Also what keeps a page of any site from asking: browsers send these types unasked."""
    body = json.dumps(ask("Hi")).encode()
    error = refusal(client.post(path, content=body, headers={"content-type": kind} if kind else {}), 415)
    assert error["code"] == "unsupported_media_type" and "application/json" in error["message"]


def test_a_detail_of_null_is_the_default(server: LiveServer, client: httpx.Client) -> None:
    prompts = []
    for more in ({"detail": None}, {"detail": "auto"}, {}):
        part = {"type": "image_url", "image_url": {"url": data_uri(png(90, 70)), **more}}
        assert client.post(CHAT, json=ask(part, "What?")).status_code == 200
        prompts.append(server.engine.submitted[-1].prompt)
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize(
    "head",
    [
        *("binary/octet-stream", "application/octet-stream", "", "IMAGE/PNG", "image/png;charset=utf-8"),
        *(f"image/png;name={'x' * 5000}.png", ";name=a"),
    ],
)
def test_bytes_decide_what_a_data_uri_holds(client: httpx.Client, head: str) -> None:
    part = {
        "type": "image_url",
        "image_url": {"url": f"data:{head};base64,{base64.b64encode(png()).decode()}"},
    }
    assert client.post(CHAT, json=ask(part, "What?")).status_code == 200


def test_a_data_uri_is_refused_for_what_is_wrong_with_it(client: httpx.Client) -> None:
    for uri, code, word in (
        (f"data:image/png;name={'x' * 9000};base64,AAAA", "data_uri_too_long", "8192"),
        (f"data:image/png;name={'x' * 9000};base64;AAAA", "data_uri_without_comma", "no comma"),
        ("data:text/html;base64,AAAA", "data_uri_media_type", "image/*"),
    ):
        part = {"type": "image_url", "image_url": {"url": uri}}
        error = refusal(client.post(CHAT, json=ask(part, "What?")), 400)
        assert error["code"] == code and word in error["message"]


def test_a_pdf_is_told_what_reads_it_however_it_comes(client: httpx.Client) -> None:
    pdf = b"\n%PDF-1.7\nrest"
    by_uri = {"type": "image_url", "image_url": {"url": data_uri(pdf)}}
    typed = {"type": "image_url", "image_url": {"url": data_uri(pdf, "application/pdf")}}
    answers = [client.post(CHAT, json=ask(part, "What?")) for part in (by_uri, typed)]
    answers.append(
        client.post("/v1/images", content=pdf, headers={"content-type": "application/octet-stream"})
    )
    for answered in answers:
        assert "vlm caption" in refusal(answered, 400)["message"]


def test_only_the_servers_own_length_of_an_answer_gives_way(server: LiveServer, client: httpx.Client) -> None:
    """The engine may cut it to what its KV cache holds; what a client asked for is kept or refused."""
    for more, fits in (({}, True), ({"max_tokens": 7}, False), ({"max_completion_tokens": 7}, False)):
        assert client.post(CHAT, json=ask("Hi", **more)).status_code == 200
        params = server.engine.submitted[-1].params
        assert params.fit_max_tokens is fits and params.max_tokens == (512 if fits else 7)
