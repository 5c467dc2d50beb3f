"""Answers in special tokens: a model's markup is told, its frame is not, and a request may say otherwise."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from family_checkpoints import DOCLING, DOCTAGS, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llm.request import Delta, Event, Finished, SamplingParams
from llm.text.tokenizer import Tokenizer
from vlm.api.app import create_app
from vlm.build import build_local_pipeline
from vlm.checkpoint import Checkpoint
from vlm.config import EngineOptions, ServeConfig
from vlm.families.registry import FAMILIES
from vlm.pipeline import ChatMessage, Pipeline
from vlm.prompt import Message
from vlm.spec import ModelSpec

REGEX = ("regex", "<doctag><text><loc_1>[ab]{3}</text></doctag>")
TEXT = "<doctag><text><loc_1>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(DOCLING, tmp_path_factory.mktemp("docling"), seed=5)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Checkpoint.read(directory).tokenizer


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def urge(tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """To write every special token that may be written."""
    return tuple((tokenizer.token_id(token), 60.0) for token in tokenizer.special_tokens())


def test_markup_is_what_is_neither_the_chats_nor_an_images_frame(tokenizer: Tokenizer) -> None:
    assert tokenizer.markup == frozenset(DOCTAGS)
    assert {"<image>", "<|end_of_text|>", "<row_1_col_2>"} <= set(tokenizer.special_tokens())
    for family in FAMILIES:
        assert not family.markup(("<|im_end|>", "<image>", "<box>", "<pad>"))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_texts_are_the_references_with_and_without_special_tokens(
    tokenizer: Tokenizer, theirs: Any, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(200, tokenizer.vocab_size - 1), max_size=30))
    frame = {tokenizer.token_id(t) for t in set(tokenizer.special_tokens()) - tokenizer.markup}
    for skip, reference in (
        (True, theirs.decode(ids, skip_special_tokens=True)),
        (False, theirs.decode(ids, skip_special_tokens=False)),
        (None, theirs.decode([i for i in ids if i not in frame], skip_special_tokens=False)),
    ):
        decoder = tokenizer.decoder(skip)
        assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == reference


def test_markup_is_anyones_to_write_and_the_frame_is_not(directory: Path, tokenizer: Tokenizer) -> None:
    build = ModelSpec.load(directory).prompt_builder.build
    ids = build([Message("user", ("at <loc_3><|end_of_text|>",))]).token_ids
    assert ids.count(tokenizer.token_id("<loc_3>")) == 1
    assert ids.count(tokenizer.token_id("<|end_of_text|>")) == 1  # the template's own


async def _answers(pipeline: Pipeline, asked: list[SamplingParams]) -> list[list[Event]]:
    await pipeline.start()

    async def one(number: int, params: SamplingParams) -> list[Event]:
        prepared = pipeline.prepare(f"r{number}", [ChatMessage("user", ("Convert.",))], params)
        return [event async for event in pipeline.run(prepared)]

    try:
        return await asyncio.gather(*itertools.starmap(one, enumerate(asked)))
    finally:
        await pipeline.close()


def told(events: list[Event]) -> tuple[str, list[int]]:
    deltas = [event for event in events if isinstance(event, Delta)]
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids]


def test_stops_and_constraints_see_what_is_told(directory: Path, tokenizer: Tokenizer) -> None:
    bias, tag = urge(tokenizer), tokenizer.token_id("<doctag>")
    wanted = [
        SamplingParams(max_tokens=40, constraint=REGEX, logit_bias=bias),
        SamplingParams(max_tokens=40, constraint=REGEX, logit_bias=bias, stop=("</text",)),
        SamplingParams(max_tokens=80, constraint=REGEX, logit_bias=bias, skip_special_tokens=True),
        SamplingParams(max_tokens=3, logit_bias=((tag, 99.0),), skip_special_tokens=True),
        SamplingParams(max_tokens=3, logit_bias=((tag, 99.0),)),
        SamplingParams(max_tokens=3, logit_bias=((tokenizer.token_id("<image>"), 99.0),)),
        SamplingParams(
            max_tokens=1, logit_bias=((tokenizer.token_id("<image>"), 99.0),), skip_special_tokens=False
        ),
        SamplingParams(max_tokens=2, logit_bias=((tag, 99.0),), beam_width=2, n=1),
    ]
    pipeline = build_local_pipeline(EngineOptions(model=str(directory), kv_cache_mb=16))
    events = asyncio.run(_answers(pipeline, wanted))
    texts, ids = zip(*map(told, events), strict=True)
    whole = texts[0]
    assert whole.startswith(TEXT) and whole.endswith("</text></doctag>") and len(whole) == len(TEXT) + 19
    assert ids[0][0] == tag and ids[0][-1] == tokenizer.token_id("</doctag>")
    assert texts[1] == whole.removesuffix("</text></doctag>")
    assert texts[2].startswith(TEXT) and tag not in ids[2]  # spelled out: the token would add no text
    assert ids[3] == [tag] * 3 and texts[3] == "" and texts[4] == "<doctag>" * 3
    assert texts[5] == "" and texts[6] == "<image>" and texts[7] == "<doctag>" * 2
    assert all(isinstance(answer[-1], Finished) for answer in events)


def test_over_http_logprobs_are_of_what_the_content_holds(directory: Path, tokenizer: Tokenizer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Convert."}],
        "max_tokens": 30,
        "logprobs": True,
        "logit_bias": {str(token_id): bias for token_id, bias in urge(tokenizer)},
        "response_format": {"type": "regex", "regex": REGEX[1]},
    }

    async def post(bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        options = EngineOptions(model=str(directory), kv_cache_mb=16)
        api = create_app(build_local_pipeline(options), ServeConfig())
        transport = httpx.ASGITransport(api)
        async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport) as http:
            return [await http.post("http://vlm/v1/chat/completions", json=body) for body in bodies]

    plain, skipped, wrong = asyncio.run(
        post([body, body | {"skip_special_tokens": True}, body | {"skip_special_tokens": "x"}])
    )
    for answer in (plain, skipped):
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"].startswith("<doctag><text>"), json.dumps(choice)
        spelled = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert spelled == choice["message"]["content"]
    assert plain.json()["choices"][0]["logprobs"]["content"][0]["token"] == "<doctag>"
    assert skipped.json()["choices"][0]["logprobs"]["content"][0]["token"] != "<doctag>"
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "skip_special_tokens"
