"""Calls keep to their tools' schemas, whatever model makes them: a random one and the default one."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from family_checkpoints import CASES, make_checkpoint
from tool_templates import HERMES

from vlm.api.app import create_app
from vlm.build import build_local_pipeline
from vlm.config import EngineOptions, ServeConfig

TYPES = ("string", "enum", "integer", "number", "boolean", "null", "array", "object", "any")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Every value it describes is short."""
    match rng.choice(TYPES[:6] if depth > 2 else TYPES):
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 12), "description": "any text"}
        case "enum":
            return {
                "enum": rng.sample(["a", 'b"', "ä", 1, None, True, "long value / \\ n"], rng.randint(1, 4))
            }
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": ["null", "boolean"]}
        case "array":
            item = random_schema(rng, depth + 1)
            return {"type": "array", "items": item, "minItems": rng.randint(0, 2), "maxItems": 3}
        case "object":
            return random_object(rng, depth + 1)
        case _:
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["name", "street address", "größe", "n_1", "a/b", 'q"'], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "title": "T", "properties": properties, "required": required}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def requests(count: int, max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    made = []
    for seed in range(count):
        rng = random.Random(seed)
        tools = [tool(f"tool_{i}", random_object(rng)) for i in range(rng.randint(1, 3))]
        asked = [{"role": "user", "content": f"Use the tools, please ({seed})."}]
        body = {"messages": asked, "tools": tools, "tool_choice": "required", "max_tokens": max_tokens}
        made.append({**body, "seed": seed, "stream": seed % 2 == 1, **more})
    return made


def answer_of(response: httpx.Response) -> tuple[str, list[dict[str, Any]]]:
    """(finish reason, calls), of a stream too."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        (choice,) = response.json()["choices"]
        return choice["finish_reason"], choice["message"]["tool_calls"]
    reason, calls = "", []
    for line in response.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        reason = choice["finish_reason"] or reason
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls.append(delta)
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return reason, calls


async def post_all(options: EngineOptions, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    api = create_app(build_local_pipeline(options), ServeConfig())
    turns = asyncio.Semaphore(16)
    async with (
        api.router.lifespan_context(api),
        httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://vlm") as http,
    ):

        async def post(body: dict[str, Any]) -> httpx.Response:
            async with turns:
                return await http.post("/v1/chat/completions", json=body, timeout=None)

        return await asyncio.gather(*map(post, bodies))


def check(bodies: list[dict[str, Any]], responses: list[httpx.Response]) -> int:
    """The number of calls."""
    num_calls = 0
    for body, response in zip(bodies, responses, strict=True):
        assert response.status_code == 200, response.text
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in body["tools"]}
        reason, calls = answer_of(response)
        assert reason == "tool_calls" and calls, (body, response.text)
        for made in calls:
            arguments = json.loads(made["function"]["arguments"])
            jsonschema.validate(arguments, schemas[made["function"]["name"]])
        num_calls += len(calls)
    return num_calls


@pytest.mark.slow
def test_a_random_models_calls_keep_to_200_random_schemas(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "internvl_300m_qwen2")
    make_checkpoint(replace(case, template=HERMES), tmp_path, seed=1)
    bodies = requests(200, 3000, temperature=1.0)
    options = EngineOptions(model=str(tmp_path), kv_cache_mb=64)
    assert check(bodies, asyncio.run(post_all(options, bodies))) > len(bodies)  # some in parallel


@pytest.mark.slow
def test_the_default_models_calls_keep_to_random_schemas() -> None:
    bodies = requests(16, 1000, parallel_tool_calls=False)
    responses = asyncio.run(post_all(EngineOptions(kv_cache_mb=64), bodies))
    assert check(bodies, responses) == len(bodies)
