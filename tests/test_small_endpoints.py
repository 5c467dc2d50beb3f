"""Small addresses that other servers have: tokens, versions, HEAD."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_engine_client import ask, live_server, model_spec, png
from hypothesis import given, settings
from hypothesis import strategies as st

import vlm


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with live_server() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


@settings(deadline=None, max_examples=20)
@given(text=st.text(alphabet=st.characters(codec="ascii", categories=("L", "N", "Zs")), max_size=40))
def test_text_comes_back_from_its_tokens_by_either_servers_names(client: httpx.Client, text: str) -> None:
    for name in ("prompt", "content"):
        told = client.post("/tokenize", json={name: text}).json()
        assert told["count"] == len(told["tokens"]) and told["max_model_len"] == model_spec().context_length
        assert client.post("/detokenize", json={"tokens": told["tokens"]}).json()[name] == text


def test_a_chats_tokens_are_those_of_its_prompt(client: httpx.Client) -> None:
    messages = ask(png(40, 30), "What?")["messages"]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokens == client.post("/v1/tokenize", json={"messages": messages}).json()["token_ids"]


def test_ids_beyond_the_vocabulary_are_refused(client: httpx.Client) -> None:
    answered = client.post("/detokenize", json={"tokens": [10**6]})
    assert answered.status_code == 400 and answered.json()["error"]["param"] == "tokens"


def test_the_version_and_a_ping(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": vlm.__version__}
    assert client.get("/ping").status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ping", "/version", "/v1/models", "/metrics", "/openapi.json"]
)
def test_head_is_answered_wherever_get_is(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code and not head.content
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_what_only_takes_a_body_is_refused(client: httpx.Client) -> None:
    assert client.head("/v1/chat/completions").status_code == 405
