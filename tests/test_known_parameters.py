"""Every parameter of a request is honoured or refused by name; none is silently dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, live_server, model_spec, png
from family_checkpoints import CASES, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from llm.request import RequestError, SamplingParams
from llm.text.chat_template import ChatTemplate
from vlm.pipeline import ImageInput, Pipeline
from vlm.requests.errors import ApiError
from vlm.requests.params import check_supported, parsed_chat, without_words
from vlm.requests.schemas import ChatRequest, CompletionRequest
from vlm.spec import ModelSpec
from workers.local.preprocess_inline import InlinePreprocess

CHAT = "/v1/chat/completions"
ANSWERED = {"role": "assistant", "content": "It is"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest])
@given(name=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20), value=st.integers() | st.text())
def test_no_unknown_parameter_is_dropped(form: Any, name: str, value: object) -> None:
    body = {"messages": ask("Hi")["messages"]} if form is ChatRequest else {"prompt": "Hi"}
    if name in form.model_fields or value in (0, 1):  # 0 and 1 are what some names stand for anyway
        return
    with pytest.raises(ValidationError) as caught:
        form.model_validate({**body, name: value})
    assert caught.value.errors()[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_what_is_unknown_is_named(server: LiveServer, route: str) -> None:
    body = {"prompt": "Hi"} if route.endswith("completions") and "chat" not in route else ask("Hi")
    body = {"input": "Hi"} if route.endswith("responses") else body
    body = {**body, "max_tokens": 5} if route.endswith("messages") else body
    told = httpx.post(server.url + route, json={**body, "length_penalty": 0.5})
    assert told.status_code == 400
    assert told.json()["error"] == {
        "message": "This parameter is not known here: 'length_penalty'.",
        "type": "invalid_request_error",
        "param": "length_penalty",
        "code": "unknown_parameter",
    }


def test_null_asks_for_nothing_whatever_its_name(server: LiveServer) -> None:
    for route, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", ask("Hi", max_tokens=5)),
    ):
        body = {**body, "never_heard_of": None}
        body["messages"] = [{"role": "user", "content": "Hi"}] if "messages" in body else None
        assert httpx.post(server.url + route, json=body).status_code == 200


def test_a_neutral_value_asks_for_nothing(server: LiveServer) -> None:
    neutral = {
        "length_penalty": 1.0,
        "echo": False,
        "priority": 0,
        "logits_processors": None,
        "verbosity": None,
    }
    assert httpx.post(server.url + CHAT, json=ask("Hi", **neutral)).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"mm_processor_kwargs": {"min_pixels": 5000}}, "mm_processor_kwargs.min_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": 5000}}, "mm_processor_kwargs.max_pixels"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 10_000}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": [ANSWERED]},
            "continue_final_message",
        ),
        ({"bad_words": ["incomprehensibilities"]}, "bad_words[0]"),
        ({"bad_words": "no"}, "bad_words"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    server: LiveServer, change: dict[str, Any], param: str
) -> None:
    told = httpx.post(server.url + CHAT, json={**ask(png(), "Hi"), **change})
    assert told.status_code == 400
    assert told.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "messages": [ask("Hi")["messages"][0], ANSWERED]},
        {"max_tokens": -1, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    ],
)
def test_costs_are_those_of_the_chat_as_it_is_asked(server: LiveServer, settings: dict[str, Any]) -> None:
    body = {**ask(png(), "Hi"), **settings}
    assert httpx.post(server.url + CHAT, json=body).status_code == 200
    prompt = server.engine.submitted[-1].prompt
    for route, name in (("/v1/tokenize", "token_ids"), ("/tokenize", "tokens")):
        assert httpx.post(server.url + route, json=body).json()[name] == list(prompt.token_ids)
    assert httpx.post(f"{server.url}/v1/estimate", json=body).json()["prompt_tokens"] == prompt.num_tokens


@pytest.mark.parametrize("route", ["/v1/tokenize", "/tokenize", "/v1/estimate"])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"chat_template": "x"}, "chat_template"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"mm_processor_kwargs": {"max_pixels": 5000}}, "mm_processor_kwargs.max_pixels"),
    ],
)
def test_costs_refuse_what_the_chat_would(
    server: LiveServer, route: str, change: dict[str, Any], param: str
) -> None:
    told = httpx.post(server.url + route, json={**ask(png(), "Hi"), **change})
    assert told.status_code == 400 and told.json()["error"]["param"] == param


def test_an_answer_goes_on_with_the_last_message(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "What?"}, ANSWERED], "continue_final_message": True}
    assert httpx.post(server.url + CHAT, json=body).status_code == 200
    request = server.engine.submitted[-1]
    written = model_spec().tokenizer.decode(request.prompt.token_ids, skip_special=False)
    assert written.endswith("It is") and not request.params.drop_leading_space


def test_a_prompt_may_end_before_an_answer_begins(server: LiveServer) -> None:
    def written(**settings: Any) -> str:
        assert httpx.post(server.url + CHAT, json=ask("Hi", **settings)).status_code == 200
        ids = server.engine.submitted[-1].prompt.token_ids
        return model_spec().tokenizer.decode(ids, skip_special=False)

    whole, without = written(), written(add_generation_prompt=False)
    assert whole.startswith(without) and len(without) < len(whole)


def test_templates_read_the_variables_they_name_and_no_others() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}",
        {"bos_token": "<s>"},
    )
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat, variables={"enable_thinking": True}) == "<s>Hi<think>"
    assert template.render(chat, variables={"enable_thinking": False}) == "<s>Hi"
    for name in ("thinking", "bos_token", "messages", "raise_exception"):
        with pytest.raises(RequestError) as caught:
            template.render(chat, variables={name: "x"})
        assert caught.value.param == "chat_template_kwargs" and "enable_thinking" in caught.value.message


class Words:
    """Some words are a token, with their space or without; of any other text each character is one."""

    def encode(self, text: str, *, allow_special: bool = True, starts: bool = True) -> list[int]:
        known = {"yes": 500, " yes": 501}
        return [known[text]] if text in known else [ord(char) for char in text]


def test_bad_words_are_forbidden_in_both_their_forms() -> None:
    params = without_words(SamplingParams(logit_bias=((7, 1.0),)), ["yes"], Words())
    assert dict(params.logit_bias) == {7: 1.0, 500: -100.0, 501: -100.0}
    with pytest.raises(ApiError) as caught:
        without_words(SamplingParams(), ["yes", "maybe"], Words())
    assert caught.value.param == "bad_words[1]"


@settings(deadline=None)
@given(extra=st.dictionaries(st.sampled_from(["tools", "stop", "top_p"]), st.none()))
def test_null_leaves_a_field_open(extra: dict[str, None]) -> None:
    check_supported(parsed_chat({**ask("Hi"), **extra}))


def test_a_cap_on_pixels_makes_an_image_cheaper_and_another_one(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen2_vl")
    spec = ModelSpec.load(str(make_checkpoint(case, tmp_path / "model", seed=5)))
    pipeline = Pipeline(spec, InlinePreprocess(), FakeEngine())
    whole, same, capped = (
        pipeline.plan_image(ImageInput(png(300, 200), max_pixels=most)) for most in (None, 1 << 28, 4096)
    )
    assert same.grid == whole.grid and same.key == whole.key
    assert capped.num_tokens < whole.num_tokens and capped.key != whole.key
    assert capped.grid.tile_width * capped.grid.tile_height <= 4096
