"""Anthropic's own client on the service: text, images, documents, tools, streams and counts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from fake_engine_client import LiveServer, live_server, png
from test_documents import PDF
from test_tools import CITY, TWO

from vlm.requests.anthropic_schemas import MessagesRequest, chat_of
from vlm.requests.tool_params import tool_use

MODEL = "vlm-default"
TOOL = {"name": "lookup", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as official:
        yield official


def image_block(data: bytes) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def asked(*blocks: Any) -> Any:
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "What is it?"}]}]


def test_an_answer_has_text_a_reason_and_usage(client: anthropic.Anthropic, server: LiveServer) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=50,
        system="Be brief.",
        messages=asked(image_block(png(40, 30))),
        extra_body={"top_k": 3},
    )
    assert answer.type == "message" and answer.role == "assistant" and answer.id.startswith("msg_")
    (block,) = answer.content
    assert block.type == "text" and block.text and answer.stop_reason in ("end_turn", "max_tokens")
    request = server.engine.submitted[-1]
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == request.prompt.num_tokens
    assert request.params.max_tokens <= 50 and request.params.top_k == 3 and request.prompt.spans


def test_a_stream_tells_the_same_as_the_whole(client: anthropic.Anthropic) -> None:
    messages = asked(image_block(png(20, 20)))
    whole = client.messages.create(model=MODEL, max_tokens=50, messages=messages)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [b.model_dump() for b in final.content] == [b.model_dump() for b in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_counts_are_those_of_the_true_prompt(client: anthropic.Anthropic, server: LiveServer) -> None:
    messages = asked(image_block(png(300, 200)))
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.", tools=[TOOL])  # type: ignore[list-item]
    client.messages.create(
        model=MODEL,
        max_tokens=5,
        messages=messages,
        system="Be brief.",
        tools=[TOOL],  # type: ignore[list-item]
    )
    assert counted.input_tokens == server.engine.submitted[-1].prompt.num_tokens


def test_documents_and_earlier_calls_have_their_places(
    client: anthropic.Anthropic, server: LiveServer
) -> None:
    document = {
        "type": "document",
        "source": {
            "type": "base64",
            "media_type": "application/pdf",
            "data": base64.b64encode(PDF).decode(),
        },
    }
    messages: Any = [
        {"role": "user", "content": [document, {"type": "text", "text": "Look it up."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I will."},
                {"type": "tool_use", "id": "toolu_1", "name": "lookup", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "9"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    client.messages.create(model=MODEL, max_tokens=5, messages=messages, tools=[TOOL])  # type: ignore[list-item]
    prompt = server.engine.submitted[-1].prompt
    assert len({span.key for span in prompt.spans}) >= 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "9"}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": "claude"}, "model"),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_its_place(
    server: LiveServer, change: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **change}
    answered = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answered.status_code in (400, 404)
    assert answered.json()["error"]["param"] == param


def test_errors_reach_the_client_by_their_class(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=asked())
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=5, messages=asked({"type": "image"}))  # type: ignore[list-item]


def test_calls_are_blocks_with_their_input(client: anthropic.Anthropic, server: LiveServer) -> None:
    weather: Any = {"name": "weather", "input_schema": CITY}
    settings: Any = {"model": MODEL, "max_tokens": 200, "messages": asked(), "tools": [weather]}
    server.engine.answer = TWO
    try:
        whole = client.messages.create(**settings)
        assert server.engine.submitted[-1].params.constraint is not None
        with client.messages.stream(**settings) as stream:
            streamed = stream.get_final_message()
    finally:
        server.engine.answer = None
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        text, *calls = answer.content
        assert text.type == "text" and text.text == "Let me look."
        assert [(c.type, c.name, c.input) for c in calls if c.type == "tool_use"] == [
            ("tool_use", "weather", {"city": city}) for city in ("Bonn", "Paris")
        ]


@pytest.mark.parametrize(
    ("choice", "must", "most"),
    [
        ({"type": "auto"}, False, 16),
        ({"type": "any"}, True, 16),
        ({"type": "tool", "name": "weather"}, True, 1),
        ({"type": "any", "disable_parallel_tool_use": True}, True, 1),
    ],
)
def test_choices_of_tools_mean_what_they_mean_there(choice: dict[str, Any], must: bool, most: int) -> None:
    tools = [{"name": "weather", "input_schema": CITY}]
    messages = [{"role": "user", "content": "Hi"}]
    body = MessagesRequest.model_validate(
        {"messages": messages, "max_tokens": 5, "tools": tools, "tool_choice": choice}
    )
    use = tool_use(chat_of(body))
    assert use is not None and (use.must_call, use.most_calls) == (must, most)
