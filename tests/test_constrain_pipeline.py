"""Constraints on the default checkpoint: through the pipeline and through `vlm caption`."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from llm.request import Delta, Event, Failed, Finished, SamplingParams
from vlm.api.app import create_app
from vlm.build import build_local_pipeline
from vlm.config import EngineOptions, ServeConfig
from vlm.pipeline import ChatMessage, ImageInput
from vlm.train.drawing.documents import compose_document

PROPERTIES = {
    "kind": {"enum": ["receipt", "sign", "label"]},
    "total": {"type": "integer", "minimum": 0, "maximum": 9999},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}


def receipt() -> bytes:
    buffer = io.BytesIO()
    compose_document("receipt", 7, 1.0).image.save(buffer, "PNG")
    return buffer.getvalue()


async def ask(constraints: list[tuple[str, str]], max_tokens: int) -> list[list[Event]]:
    pipeline = build_local_pipeline(EngineOptions(kv_cache_mb=64))
    await pipeline.start()

    async def one(number: int, constraint: tuple[str, str]) -> list[Event]:
        content = (ImageInput(receipt()), "What is this?")
        params = SamplingParams(max_tokens=max_tokens, constraint=constraint)
        prepared = pipeline.prepare(f"r{number}", [ChatMessage("user", content)], params)
        return [event async for event in pipeline.run(prepared)]

    try:
        return await asyncio.gather(*(one(i, constraint) for i, constraint in enumerate(constraints)))
    finally:
        await pipeline.close()


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_answers_about_an_image_keep_to_their_constraints_and_a_bad_one_fails_alone() -> None:
    regex, bad = ("regex", "(yes|no), [0-9]{3}"), ("json_schema", '{"type":"x"}')
    told = asyncio.run(ask([("json_schema", json.dumps(SCHEMA)), regex, bad], 64))
    jsonschema.validate(json.loads(text_of(told[0])), SCHEMA)
    assert text_of(told[1])[:2] in ("ye", "no") and text_of(told[1])[-3:].isdigit()
    assert all(isinstance(t[-1], Finished) and t[-1].reason == "stop" for t in told[:2])
    assert isinstance(told[2][-1], Failed) and told[2][-1].code == "invalid_constraint"


def test_caption_with_a_schema_writes_rows_that_match_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(receipt())
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    paths = [str(tmp_path / name) for name in ("a.png", "rows.jsonl", "schema.json")]
    arguments = ["caption", paths[0], "-o", paths[1], "--schema", paths[2], "--max-tokens", "64", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "vlm.cli.main", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in Path(paths[1]).read_text().splitlines()]
    jsonschema.validate(json.loads(row["text"]), SCHEMA)


def test_over_http_a_refused_constraint_is_a_400_of_that_request() -> None:
    async def post(bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        api = create_app(build_local_pipeline(EngineOptions(kv_cache_mb=64)), ServeConfig())
        transport = httpx.ASGITransport(api)
        async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport) as http:
            posts = [http.post("http://vlm/v1/chat/completions", json=body) for body in bodies]
            return await asyncio.gather(*posts)

    asked = {"messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 64}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        {"type": "regex", "regex": "(a"},
    ]
    bodies: list[dict[str, Any]] = [asked | {"response_format": form} for form in formats]
    bodies += [body | {"stream": True} for body in bodies[1:]]
    good, *refused = asyncio.run(post(bodies))
    jsonschema.validate(json.loads(good.json()["choices"][0]["message"]["content"]), SCHEMA)
    assert [answer.status_code for answer in refused] == [400] * 4
    assert {answer.json()["error"]["code"] for answer in refused} == {"invalid_constraint"}
