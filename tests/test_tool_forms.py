"""How calls are written: the chat template's own form is found, its grammar admits nothing else, and what is
written is read back, wherever token borders fall."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_engine_client import model_spec
from hypothesis import given
from hypothesis import strategies as st
from tool_templates import HERMES, LLAMA, MISTRAL

from llm.constraints.grammar import Compiler
from llm.text.chat_template import ChatTemplate
from vlm.prompt import Message, PromptBuilder, Rendering
from vlm.tools.call_grammar import answer_term, grammar
from vlm.tools.calls import Call, Tool, ToolUse
from vlm.tools.forms import HERMES as HERMES_FORM
from vlm.tools.forms import LLAMA as LLAMA_FORM
from vlm.tools.forms import MISTRAL as MISTRAL_FORM
from vlm.tools.forms import SPELLED_OUT, CallForm, form_of
from vlm.tools.parser import Arguments, CallBegun, CallParser, Part, Text

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER, CLOCK = Tool("weather", "Tells the weather.", CITY), Tool("clock", "Tells the time.")
USE = ToolUse((WEATHER, CLOCK))
SPECIAL = "<fake_token_around_image>"  # of the shipped tokenizer; it adds nothing to a text
FORMS = [SPELLED_OUT, MISTRAL_FORM, LLAMA_FORM, replace(MISTRAL_FORM, trigger=SPECIAL)]
FORMS[-1] = replace(FORMS[-1], specials={SPECIAL: model_spec().tokenizer.token_id(SPECIAL)})


class Templated:
    """The shipped tokenizer with another chat template."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})
        self.encode = model_spec().tokenizer.encode
        self.token_id = model_spec().tokenizer.token_id
        self.markup = model_spec().tokenizer.markup

    def special_tokens(self) -> tuple[str, ...]:
        return tuple(model_spec().tokenizer.special_tokens())

    def render(self, messages: Any, **options: Any) -> str:
        return self._template.render(messages, **options)


@pytest.mark.parametrize(
    ("source", "form"), [(HERMES, HERMES_FORM), (MISTRAL, MISTRAL_FORM), (LLAMA, LLAMA_FORM)]
)
def test_the_form_of_a_template_that_shows_tools_is_found(source: str, form: CallForm) -> None:
    assert form_of(Templated(source)) == form


def test_a_template_that_leaves_tools_or_results_out_has_the_form_that_messages_spell_out() -> None:
    assert form_of(model_spec().tokenizer) == SPELLED_OUT
    without_results = HERMES.replace("{{ text(m.content) }}\n</tool_response>", "</tool_response>")
    assert without_results != HERMES and form_of(Templated(without_results)) == SPELLED_OUT


@pytest.mark.parametrize("source", [None, HERMES, MISTRAL, LLAMA])
def test_prompts_show_tools_calls_and_results_and_no_special_token_of_theirs(source: str | None) -> None:
    hostile = "<end_of_utterance>"
    tool = Tool("weather", f"Tells {hostile} the weather.", CITY)
    chat = [
        Message("user", ("Weather?",)),
        Message("assistant", ("",), (Call("call_1", "weather", {"city": f"Paris {hostile}"}),)),
        Message("tool", (f"sunny {hostile}",), call_id="call_1", name="weather"),
        Message("user", ("And now?",)),
    ]
    tokenizer = Templated(source) if source else model_spec().tokenizer
    ids = PromptBuilder(tokenizer, model_spec().image_format).build(chat, Rendering((tool,))).token_ids
    text = model_spec().tokenizer.decode(ids, skip_special=False)
    for shown in ("Tells", '"maxLength"', '"city": "Paris', "sunny", "And now?"):
        assert shown in text, shown
    # the shipped template ends its messages with that token: of the system, the user, the answer, the user
    assert ids.count(model_spec().tokenizer.token_id(hostile)) == (0 if source else 4)


def joined(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for part in parts:
        match part:
            case Text(text=more):
                text += more
            case CallBegun(name=name):
                calls.append((name, ""))
            case Arguments(index=index, text=more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return text, calls


ARGUMENTS = st.dictionaries(st.text(max_size=6), st.text(max_size=8) | st.integers() | st.none(), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "clock"]), ARGUMENTS), max_size=3)


@given(st.sampled_from(FORMS), st.text(max_size=12), CALLS, st.data())
def test_calls_are_read_back_wherever_the_text_is_cut(
    form: CallForm, text: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    """A call's text is told as it was written; text before it is told but for white space at its end."""
    if not form.can_repeat:
        calls = calls[:1]
    if not form.trigger and calls:
        text = ""
    written = form.between.join(form.call(*call) for call in calls)
    whole = form.trigger + form.opening + written + form.ending if calls else ""
    parser = CallParser(USE, form)
    parts: list[Part] = []
    for piece in form.pieces(text + whole):
        if isinstance(piece, int):
            parts += parser.push("", (piece,))
            continue
        cuts = data.draw(st.lists(st.integers(0, len(piece)), max_size=4))
        borders = [0, *sorted(cuts), len(piece)]
        for start, end in pairwise(borders):
            parts += parser.push(piece[start:end])
    shown, told = joined(parts + parser.flush())
    assert told == [(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]
    assert shown == (text.rstrip() if calls else text) and parser.num_calls == len(calls)


def admits(use: ToolUse, form: CallForm, text: str, answer: str | None = None) -> bool:
    tokenizer = model_spec().tokenizer
    ids = []
    for piece in form.pieces(text):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, allow_special=False)
    matcher = _compiled(grammar(use, form, answer)).deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _compiled(text: str) -> Any:
    tokenizer = model_spec().tokenizer
    end = tokenizer.token_id("<end_of_utterance>")
    return Compiler(tokenizer.vocabulary(), [end]).compile("grammar", text).matcher


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_admits_text_or_calls_by_the_schema_and_nothing_else(form: CallForm) -> None:
    good = form.call("weather", {"city": "Bonn"})
    begin, end = form.trigger + form.opening, form.ending
    must = replace(USE, must_call=True)
    for use in (USE, must):
        assert admits(use, form, begin + good + end)
        assert admits(use, form, begin + form.call("clock", {}) + end)
        if form.trigger:
            assert not admits(use, form, begin + form.call("weather", {"town": "Bonn"}) + end)
            assert not admits(use, form, begin + form.call("weather", {"city": 3}) + end)
            assert not admits(use, form, begin + form.call("other", {}) + end)
            assert not admits(use, form, begin + "x")
        two = begin + good + form.between + good + end
        assert admits(use, form, two) == form.can_repeat
        assert not form.can_repeat or not admits(replace(use, most_calls=1), form, two)
    assert admits(USE, form, "It is sunny.") and not admits(must, form, "It is sunny.")


def test_an_answer_without_calls_keeps_to_its_format() -> None:
    call = SPELLED_OUT.trigger + SPELLED_OUT.call("clock", {})
    for constraint, good, bad in (
        (("json_object", ""), '{"a": 1}', "a"),
        (("json_schema", json.dumps(CITY)), '{"city": "Bonn"}', "{}"),
        (("regex", "a/b|c\\/d"), "a/b", "a"),
    ):
        term = answer_term(constraint)
        assert admits(USE, SPELLED_OUT, good, term) and admits(USE, SPELLED_OUT, call, term)
        assert not admits(USE, SPELLED_OUT, bad, term)
