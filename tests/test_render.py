"""A chat as tokens: the prompt that would run, and images by what they show; nothing is decoded or run."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, live_server, png

RENDER = "/v1/chat/completions/render"


def about(*images: bytes, text: str = "What is this?", **more: Any) -> dict[str, Any]:
    return ask(*images, text, **more)


@pytest.fixture(scope="module")
def server() -> Any:
    with live_server(FakeEngine()) as running:
        yield running


def rendered(server: LiveServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.client() as http:
        answer = http.post(RENDER, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()


def test_its_tokens_are_those_of_the_prompt_and_its_places_those_of_the_images(server: LiveServer) -> None:
    red, blue = png(), png(300, 200, (0, 0, 255))
    body = about(red, blue, red)
    found = rendered(server, body)
    with server.client() as http:
        counted = http.post("/v1/tokenize", json={"messages": body["messages"]}).json()
    assert found["token_ids"] == counted["token_ids"]
    places = found["features"]["mm_placeholders"]["image"]
    assert sum(place["length"] for place in places) == counted["image_tokens"]
    covered = {place["offset"] + i for place in places for i in range(place["length"])}
    image_id = server.service.pipeline.spec.image_format.row_id
    assert covered == {i for i, token in enumerate(found["token_ids"]) if token == image_id}
    hashes = found["features"]["mm_hashes"]["image"]
    assert len(hashes) == len(places) and len({name.split(":")[0] for name in hashes}) == 2
    assert not server.engine.submitted and not server.engine.num_wants


def test_a_hash_names_the_pixels_their_cut_and_the_tenant(server: LiveServer) -> None:
    def name(**more: Any) -> str:
        return str(rendered(server, about(png(), **more))["features"]["mm_hashes"]["image"][0])

    assert name() == name(text="Another question") != name(cache_salt="tenant")
    assert rendered(server, about(png(), cache_salt="tenant"))["cache_salt"]


def test_a_chat_without_images_has_no_features(server: LiveServer) -> None:
    assert rendered(server, ask("Hi"))["features"] is None


def test_sampling_parameters_and_constraints_keep_their_names(server: LiveServer) -> None:
    schema = {"type": "object"}
    found = rendered(
        server,
        about(
            png(),
            temperature=0.5,
            max_tokens=7,
            stop=["x"],
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        ),
    )["sampling_params"]
    assert (found["temperature"], found["max_tokens"], found["stop"], found["logprobs"]) == (0.5, 7, ["x"], 2)
    assert found["structured_outputs"].keys() == {"json"}


def test_what_a_chat_may_not_ask_is_refused_here_too(server: LiveServer) -> None:
    assert rendered(server, about(b"no image"), 400)["error"]["code"] == "unsupported_image_format"
    assert rendered(server, {**about(png()), "temperature": 9}, 400)["error"]["param"] == "temperature"
