"""OpenAI's own client on the Responses API: texts, images, documents, tools, streams, stored responses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fake_engine_client import LiveServer, data_uri, live_server, model_spec, png
from pydantic import BaseModel
from test_documents import PDF
from test_tools import CITY, TWO

from vlm.api.guard.auth import Caller, KeyRing
from vlm.api.guard.keys import ApiKey
from vlm.api.openai_responses.response_store import ResponseStore
from vlm.config import ServeConfig
from vlm.requests.errors import ApiError

MODEL = "vlm-default"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CALLED: list[Any] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I will look."},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Bonn"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    server.engine.answer = None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official
    server.engine.answer = None


def shown(*parts: Any) -> Any:
    return [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, *parts]}]


def image(width: int = 40) -> Any:
    return {"type": "input_image", "image_url": data_uri(png(width, 30)), "detail": "auto"}


def prompt_text(server: LiveServer) -> str:
    return model_spec().tokenizer.decode(server.engine.submitted[-1].prompt.token_ids, skip_special=False)


def test_an_answer_has_text_a_status_and_usage(client: openai.OpenAI, server: LiveServer) -> None:
    answer = client.responses.create(
        model=MODEL, input=shown(image()), instructions="Be brief.", metadata={"a": "b"}
    )
    assert answer.status == "completed" and answer.output_text.startswith("I saw 1 images")
    assert answer.id.startswith("resp_") and answer.metadata == {"a": "b"}
    prompt = server.engine.submitted[-1].prompt
    assert answer.usage is not None and answer.usage.input_tokens == prompt.num_tokens
    assert prompt.spans and "Be brief." in prompt_text(server)


def test_documents_are_their_pages(client: openai.OpenAI, server: LiveServer) -> None:
    file = {"type": "input_file", "file_data": data_uri(PDF, "application/pdf"), "filename": "a.pdf"}
    client.responses.create(model=MODEL, input=shown(file))
    assert server.engine.submitted[-1].prompt.spans


def test_what_ends_at_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_a_stream_tells_the_same_in_the_order_of_the_api(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=shown(image()))
    with client.responses.stream(model=MODEL, input=shown(image())) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in seen]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"} and kinds[-4:] == ends
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert final.output_text == whole.output_text
    assert final.usage is not None and whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == whole.output_text


def test_calls_are_items_whole_and_streamed(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.answer = TWO
    whole = client.responses.create(model=MODEL, input="Hi", tools=[WEATHER])
    with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    for answer in (whole, streamed):
        message, *calls = answer.output
        assert message.type == "message" and message.content[0].text == "Let me look."  # type: ignore[union-attr]
        assert [(c.name, c.arguments) for c in calls if c.type == "function_call"] == [
            ("weather", f'{{"city": "{city}"}}') for city in ("Bonn", "Paris")
        ]
    server.engine.answer = None
    outputs: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in whole.output
        if call.type == "function_call"
    ]
    client.responses.create(model=MODEL, previous_response_id=whole.id, input=outputs, tools=[WEATHER])
    text = prompt_text(server)
    assert text.index("Let me look.") < text.index("Bonn") < text.index("Paris") < text.index("sunny")


def test_earlier_calls_of_one_answer_are_one_message(server: LiveServer, client: openai.OpenAI) -> None:
    client.responses.create(model=MODEL, input=CALLED, tools=[WEATHER], tool_choice="none")
    text = prompt_text(server)
    assert text.index("I will look.") < text.index("Bonn") < text.index("sunny")


def test_an_answer_matches_the_schema_it_is_parsed_by(client: openai.OpenAI, server: LiveServer) -> None:
    class Place(BaseModel):
        city: str

    server.engine.answer = '{"city": "Bonn"}'
    parsed = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Bonn")
    constraint = server.engine.submitted[-1].params.constraint
    assert constraint is not None and constraint[0] == "json_schema"


def test_logprobs_come_where_they_are_asked_for(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="Hi", top_logprobs=1, include=["message.output_text.logprobs"]
    )
    content: Any = answer.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in content.logprobs) == answer.output_text


def test_a_chat_goes_on_from_a_stored_response(client: openai.OpenAI, server: LiveServer) -> None:
    first = client.responses.create(model=MODEL, input=shown(image()), instructions="Only now.")
    second = client.responses.create(model=MODEL, input="Sure?", previous_response_id=first.id)
    text = prompt_text(server)
    assert "What is it?" in text and first.output_text in text and "Sure?" in text
    assert "Only now." not in text and server.engine.submitted[-1].prompt.spans
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="And?", previous_response_id=second.id)
    assert "What is it?" in prompt_text(server)


def test_items_of_stored_responses_are_meant_by_their_ids(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.answer = "A red square."
    first = client.responses.create(model=MODEL, input="What is it?")
    item: Any = {"type": "item_reference", "id": first.output[0].id}
    asked: Any = {"role": "user", "content": "Sure?"}
    client.responses.create(model=MODEL, input=[item, asked])
    assert "A red square." in prompt_text(server)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=[{**item, "id": "msg_1"}, asked])


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_no_key_reads_responses_of_another() -> None:
    keys = [ApiKey(n, hashlib.sha256(n.encode()).hexdigest(), namespace="shared") for n in ("a", "b")]
    with live_server(keys=KeyRing(keys)) as running:
        mine, theirs = (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=name, max_retries=0) for name in ("a", "b")
        )
        answer = mine.responses.create(model=MODEL, input="A secret.")
        item: Any = {"type": "item_reference", "id": answer.output[0].id}
        for use in (
            lambda: theirs.responses.retrieve(answer.id),
            lambda: theirs.responses.delete(answer.id),
            lambda: theirs.responses.create(model=MODEL, input="Hi", previous_response_id=answer.id),
            lambda: theirs.responses.create(model=MODEL, input=[item]),
        ):
            with pytest.raises(openai.NotFoundError):
                use()
        assert mine.responses.retrieve(answer.id).id == answer.id
        mine.close()
        theirs.close()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        (
            {"input": [CALLED[0], *shown({"type": "input_image", "image_url": "nothing"})]},
            "input[1].content[1].image_url",
        ),
        (
            {"instructions": "x", "input": shown({"type": "input_file", "file_data": "data:,"})},
            "input[0].content[1].file_data",
        ),
        ({"input": [{**CALLED[2], "name": "no name"}]}, "input[0].tool_calls[0].function.name"),
        ({"input": [CALLED[3]]}, "input[0].tool_call_id"),
        ({"input": []}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"shape": 1}}, "text.shape"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_its_place(
    server: LiveServer, change: dict[str, Any], param: str
) -> None:
    answered = httpx.post(f"{server.url}/v1/responses", json={"input": "Hi", **change})
    assert answered.status_code in (400, 404)
    assert answered.json()["error"]["param"] == param


def test_a_failure_in_the_middle_is_an_event(server: LiveServer) -> None:
    server.engine.fail_with = ("engine_died", "The engine stopped.")
    try:
        told = httpx.post(f"{server.url}/v1/responses", json={"input": "Hi", "stream": True}).text
        whole = httpx.post(f"{server.url}/v1/responses", json={"input": "Hi"})
    finally:
        server.engine.fail_with = None
    assert told.rstrip().rpartition("\nevent: ")[2].startswith("response.failed")
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "engine_died"


def test_an_answer_is_as_it_is_documented(server: LiveServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/ResponseOut", "components": document["components"]}
    answered = httpx.post(f"{server.url}/v1/responses", json={"input": "Hi"}).json()
    jsonschema.validate(answered, schema)
    jsonschema.validate(httpx.get(f"{server.url}/v1/responses/{answered['id']}").json(), schema)


def test_stored_responses_are_bounded_in_count_bytes_and_time() -> None:
    caller = Caller("a", "a")
    now = 0.0
    store = ResponseStore(2, 10_000, 60.0, clock=lambda: now)
    for name in ("1", "2", "3"):
        assert store.put(caller, {"id": name}, [{"content": "x" * 1_000}])
    assert len(store) == 2
    with pytest.raises(ApiError):
        store.get(caller, "1")
    assert not store.put(caller, {"id": "4"}, [{"content": "x" * 10_000}])
    assert store.put(caller, {"id": "5"}, [{"content": "x" * 9_000}])
    assert len(store) == 1 and 9_000 < store.num_bytes <= 10_000
    now = 60.0
    with pytest.raises(ApiError):
        store.get(caller, "5")
    assert len(store) == 0 and store.num_bytes == 0


def test_a_server_may_store_none() -> None:
    with live_server(config=ServeConfig(max_responses=0)) as running:
        answered = httpx.post(f"{running.url}/v1/responses", json={"input": "Hi"}).json()
        assert answered["store"] is False
        assert httpx.get(f"{running.url}/v1/responses/{answered['id']}").status_code == 404
