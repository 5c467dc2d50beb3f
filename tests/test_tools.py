"""Tools over HTTP, as the official client sees them: choices, calls, streams, results, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine_client import FakeEngine, LiveServer, live_server, model_spec

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Bonn and Paris?"}]
FORM = model_spec().prompt_builder.call_form
TWO = "Let me look.\n<tool_call>" + FORM.between.join(
    FORM.call("weather", {"city": city}) for city in ("Bonn", "Paris")
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine()) as running:
        yield running


@pytest.fixture
def official(server: LiveServer) -> Iterator[openai.OpenAI]:
    server.engine.answer = None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_parallel_calls_are_told_with_ids_and_their_text(server: LiveServer, official: openai.OpenAI) -> None:
    server.engine.answer = TWO
    made = official.chat.completions.create(model="vlm-default", messages=ASKED, tools=[WEATHER, CLOCK])
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls: list[Any] = list(choice.message.tool_calls or ())
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bonn", "Paris"]
    assert len({call.id for call in calls}) == 2


def test_streamed_deltas_add_up_to_the_whole_answer(server: LiveServer, official: openai.OpenAI) -> None:
    server.engine.answer = TWO
    with official.chat.completions.stream(
        model="vlm-default", messages=ASKED, tools=[WEATHER], n=2
    ) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 8  # arguments come in pieces
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
        arguments = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert [json.loads(text) for text in arguments] == [{"city": "Bonn"}, {"city": "Paris"}]
    ids = {call.id for choice in final.choices for call in choice.message.tool_calls or ()}
    assert len(ids) == 4


def test_text_stays_text_and_a_call_cut_short_ends_with_length(
    server: LiveServer, official: openai.OpenAI
) -> None:
    create = official.chat.completions.create
    server.engine.answer = "It is sunny."
    (choice,) = create(model="vlm-default", messages=ASKED, tools=[WEATHER]).choices
    assert (choice.message.content, choice.message.tool_calls) == ("It is sunny.", None)
    assert choice.finish_reason == "stop"
    server.engine.answer = TWO
    num_tokens = len(model_spec().tokenizer.encode(TWO)) - 8
    made = create(model="vlm-default", messages=ASKED, tools=[WEATHER], max_tokens=num_tokens)
    assert made.choices[0].finish_reason == "length" and made.choices[0].message.tool_calls


def test_results_go_back_to_the_model(server: LiveServer, official: openai.OpenAI) -> None:
    server.engine.answer = TWO
    create = official.chat.completions.create
    answer = create(model="vlm-default", messages=ASKED, tools=[WEATHER]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {index}"}
        for index, call in enumerate(answer.tool_calls or ())
    ]
    server.engine.answer = "Sunny in both."
    create(model="vlm-default", messages=[*ASKED, answer, *results], tools=[WEATHER])  # type: ignore[list-item]
    text = model_spec().tokenizer.decode(server.engine.submitted[-1].prompt.token_ids)
    assert '"city": "Paris"' in text
    assert text.index("Let me look.") < text.index('"Bonn"') < text.index("result 0") < text.index("result 1")


@pytest.mark.parametrize(
    ("choice", "parallel", "calls", "admits_text", "most"),
    [
        ("auto", None, ["weather", "clock"], True, 16),
        ("auto", False, ["weather", "clock"], True, 1),
        ("required", None, ["weather", "clock"], False, 16),
        ({"type": "function", "function": {"name": "clock"}}, None, ["clock"], False, 1),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}},
            *(None, ["clock"], True, 16),
        ),
    ],
)
def test_choices_say_which_calls_the_constraint_admits(
    server: LiveServer, choice: Any, parallel: Any, calls: list[str], admits_text: bool, most: int
) -> None:
    body = {"messages": ASKED, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    body["parallel_tool_calls"] = parallel
    with server.client() as http:
        assert http.post(CHAT, json=body).status_code == 200
    kind, grammar = server.engine.submitted[-1].params.constraint or ("", "")
    assert (
        kind == "grammar" and [name for name in ("weather", "clock") if f'\\"{name}\\"' in grammar] == calls
    )
    assert grammar.startswith("start: TEXT") == admits_text
    assert (f"{{0,{most - 1}}}" in grammar) == (most > 1)


def test_without_tools_or_with_none_nothing_is_constrained_nor_shown(server: LiveServer) -> None:
    prompts = []
    with server.client() as http:
        for more in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
            assert http.post(CHAT, json={"messages": ASKED, **more}).status_code == 200
            assert server.engine.submitted[-1].params.constraint is None
            prompts.append(server.engine.submitted[-1].prompt)
    assert prompts[0] == prompts[1] == prompts[2]


CALLED = {"role": "assistant", "content": None, "tool_calls": []}


def call(**function: Any) -> dict[str, Any]:
    return {**CALLED, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "use_beam_search": True, "n": 2}, "tools"),
        (
            {"tools": [CLOCK], "response_format": {"type": "grammar", "grammar": "start: /a/"}},
            "response_format",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools",
        ),
        ({"functions": [{"name": "a"}]}, "functions"),
        (
            {"messages": [*ASKED, call(name="a", arguments="[1]")]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*ASKED, {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
            "messages[1].tool_call_id",
        ),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_its_place(
    server: LiveServer, body: dict[str, Any], param: str
) -> None:
    with server.client() as http:
        answer: httpx.Response = http.post(CHAT, json={"messages": ASKED, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
