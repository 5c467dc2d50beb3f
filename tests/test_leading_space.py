"""Models begin answers with a space: no text and no constraint counts it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fake_backend import ByteTokens, Harness, text_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.constraints.constrain import Grammars
from llm.request import Request, SamplingParams
from llm.text.outputs import LeadingSpaces, TextStream
from vlm.api.app import create_app
from vlm.build import build_local_pipeline
from vlm.config import EngineOptions, ServeConfig
from workers.children.grammar_process import GrammarProcess

SAMPLES = Path(__file__).resolve().parent.parent / "vlm" / "samples"
BYTES = 0xC0  # ASCII and what may follow in a longer UTF-8 sequence
TABLE = (*(bytes([i]) for i in range(BYTES)), b" a", b"  ", b" 1", b' {"', b"")
EOS = len(TABLE) - 1
URGE = ((32, 6.0), *((i, 6.0) for i in range(BYTES, EOS)))  # to begin with a space
CHAT = SamplingParams(drop_leading_space=True)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TABLE, frozenset({EOS}), len(TABLE), check=GrammarProcess)
    yield made
    made.close()


@given(st.lists(st.text(" a", max_size=4)))
def test_an_answer_begins_with_its_first_character_wherever_tokens_end(pieces: list[str]) -> None:
    text = "".join(pieces)
    for params, expected in (
        (CHAT, text.lstrip(" ")),
        (SamplingParams(drop_leading_space=True, constraint=("regex", "a")), text.removeprefix(" ")),
        (SamplingParams(), text),
    ):
        assert "".join(map(LeadingSpaces(params).take_off, pieces)) == expected
        data = [piece.encode() for piece in pieces]
        assert b"".join(map(LeadingSpaces(params).take_off, data)) == expected.encode()


def test_stop_strings_are_looked_for_in_the_text_that_is_told() -> None:
    stream = TextStream(
        ByteTokens((b" ", b"one", b" two")), SamplingParams(stop=(" ",), drop_leading_space=True)
    )
    assert [stream.push(token) for token in (0, 1, 2)] == [("", False), ("one", False), ("", True)]


def test_the_space_that_sentencepiece_drops_is_not_dropped_twice() -> None:
    class Stripping(ByteTokens):
        strips_first_space = True

    params = SamplingParams(drop_leading_space=True, constraint=("regex", " a"))
    assert TextStream(Stripping((b" a",)), params).push(0) == (" a", False)  # the decoder has dropped one


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 3), temperature=st.sampled_from([0.0, 1.0]))
def test_what_is_told_meets_the_constraint_exactly(
    grammars: Grammars, seed: int, n: int, temperature: float
) -> None:
    patterns = ["[0-9]{2}", " [a-z]{2}", ".{3}", " *a", "[ab]{0,4}", "", "a|  b"]
    constraints = [("regex", pattern) for pattern in patterns]
    constraints += [("grammar", 'start: "x" | " y"'), ("json_schema", '{"enum": [" a", 1]}')]
    harness = Harness(
        vocab_size=len(TABLE),
        grammars=grammars,
        tokens=ByteTokens(TABLE),
        eos=frozenset({EOS}),
        max_running=32,
    )
    for i, constraint in enumerate(constraints):
        params = SamplingParams(
            max_tokens=30,
            n=n,
            temperature=temperature,
            seed=seed + i,
            logit_bias=URGE,
            constraint=constraint,
            drop_leading_space=True,
        )
        harness.submit(Request(f"r{i}", text_prompt(1, 2, seed % 90), params))
    harness.run()
    harness.assert_clean()
    assert not harness.failed
    for (name, _), answer in harness.answers.items():
        if answer.reason != "stop":
            continue
        kind, text = constraints[int(name[1:])]
        match kind:
            case "regex":
                assert re.fullmatch(text, answer.text), (text, answer.text)
            case "grammar":
                assert answer.text in ("x", " y")
            case _:
                jsonschema.validate(json.loads(answer.text), json.loads(text))
                assert not answer.text.startswith(" ")


def test_a_space_comes_first_only_where_it_is_dropped(grammars: Grammars) -> None:
    compiled = grammars.compile("regex", "[0-9]+|a")
    strict = grammars.start(compiled).mask()
    assert {TABLE[i] for i in strict.nonzero()[0]} == {*(b"%d" % i for i in range(10)), b"a"}
    lenient = grammars.start(compiled, may_begin_with_space=True)
    assert {TABLE[i] for i in lenient.mask().nonzero()[0]} == {
        *(b"%d" % i for i in range(10)),
        b"a",
        b" ",
        b" a",
        b" 1",
    }
    other = lenient.fork()
    lenient.accept(TABLE.index(b" 1"))
    other.accept(ord("1"))
    assert (lenient.mask() == other.mask()).all()


Post = Callable[..., Awaitable[httpx.Response]]


@pytest.fixture(scope="module")
def service() -> Iterator[Callable[[Callable[[Post], Awaitable[None]]], None]]:
    """Runs what is given a way to ask the default model."""
    with asyncio.Runner() as runner, ExitStack() as stack:
        api = create_app(build_local_pipeline(EngineOptions(kv_cache_mb=64)), ServeConfig())
        http = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://vlm")
        lifespan = api.router.lifespan_context(api)
        runner.run(lifespan.__aenter__())
        stack.callback(lambda: runner.run(lifespan.__aexit__(None, None, None)))

        def post(content: object, **settings: Any) -> Awaitable[httpx.Response]:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16} | settings
            return http.post("/v1/chat/completions", json=body)

        yield lambda test: runner.run(test(post))


def about(name: str, question: str) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode((SAMPLES / name).read_bytes()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


def masked(answer: str) -> str:
    """A pattern of its form: digits and letters are free."""
    runs = {"0": "[0-9]+", "a": "[A-Za-z]+"}
    form = re.sub("[A-Za-z]+", "a", re.sub("[0-9]+", "0", answer))
    return "".join(runs.get(character, re.escape(character)) for character in form)


def test_a_constraint_that_the_free_answer_meets_does_not_change_it(service: Any) -> None:
    """The default model on its samples: 258.92 stays 258.92 under a pattern of prices."""
    names = ["Zo Doli", "Ze Deli", "Za Dali"]

    def constraints(answer: str) -> Iterator[dict[str, Any]]:
        yield {"type": "text"}
        yield {"type": "regex", "regex": masked(answer)}
        yield {"type": "regex", "regex": "|".join(map(re.escape, {*names, f"9{answer[1:]}", answer}))}
        yield {"type": "grammar", "grammar": f"start: {' | '.join(map(json.dumps, (*names, answer)))}"}
        if re.fullmatch(r"[0-9]+\.[0-9]{2}", answer):
            yield {"type": "regex", "regex": r"[0-9]+\.[0-9]{2}"}
        if answer.isdigit():
            yield {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}

    async def test(post: Post) -> None:
        for entry in json.loads((SAMPLES / "samples.json").read_text()):
            for question, answer in entry["qa"]:
                if len(answer) > 12:
                    continue
                content = about(entry["file"], question)
                told = await asyncio.gather(
                    *(post(content, response_format=form) for form in constraints(answer))
                )
                contents = [response.json()["choices"][0]["message"]["content"] for response in told]
                assert contents == [answer] * len(told)

    service(test)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 3, "temperature": 1.5, "seed": 1},
        {"beam_width": 3, "n": 3},
        {"response_format": {"type": "regex", "regex": "[0-9]{3}|[a-z]{4}"}},
        {"logit_bias": {"220": 30}},  # spaces only
    ],
)
def test_content_and_logprobs_over_http_begin_with_the_first_character(
    service: Any, settings: dict[str, Any]
) -> None:
    async def test(post: Post) -> None:
        content = about("invoice.png", "What is the total?")
        asked = {"logprobs": True, "top_logprobs": 2, **settings}
        plain = (await post(content, **asked)).json()["choices"]
        stream = (await post(content, **asked, stream=True)).text
        streamed: list[Any] = [["", []] for _ in plain]
        for line in stream.split("\n\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                streamed[choice["index"]][0] += choice["delta"].get("content", "")
                streamed[choice["index"]][1] += (choice["logprobs"] or {"content": []})["content"]
        for choice, both in zip(plain, streamed, strict=True):
            told, tokens = choice["message"]["content"], choice["logprobs"]["content"]
            assert both == [told, tokens] and not told.startswith(" ")
            if tokens[-1]["token"].startswith("<"):
                tokens = tokens[:-1]  # the end token
            assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == told
            assert all(len(token["top_logprobs"]) == 2 for token in tokens)
            if not settings:
                assert told == "258.92" and tokens[0]["token"] == ""  # the space
                assert [t["token"] for t in tokens] == [t["top_logprobs"][0]["token"] for t in tokens]

    service(test)
