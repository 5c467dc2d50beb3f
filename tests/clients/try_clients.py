"""Clients that nobody here wrote, on their default paths, against a running server.

    python -m venv /tmp/clients && /tmp/clients/bin/pip install openai instructor 'pydantic-ai-slim[openai]' \
        langchain-openai langgraph llama-index-llms-openai-like litellm llm
    vlm serve &
    /tmp/clients/bin/python tests/clients/try_clients.py http://127.0.0.1:8000

Prints a line for each: what came of it. The exit status is 1 if any failed; those that are not installed are
passed over.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "vlm-default"
KEY = "none"
CLIENTS: dict[str, tuple[str, Callable[[str], object]]] = {}  # by what it shows: (module, what to run)


def client(module: str, shows: str) -> Callable[[Callable[[str], object]], Callable[[str], object]]:
    def keep(run: Callable[[str], object]) -> Callable[[str], object]:
        CLIENTS[f"{module}: {shows}"] = (module, run)
        return run

    return keep


def png() -> bytes:
    """A red square."""
    side = 32
    rows = (b"\0" + b"\xc8\x1e\x1e" * side) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    head = struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def image_uri() -> str:
    return "data:image/png;base64," + base64.b64encode(png()).decode()


@client("openai", "responses.create with an image, then previous_response_id")
def openai_responses(url: str) -> object:
    import openai

    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    content: Any = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": image_uri(), "detail": "auto"},
    ]
    first = sdk.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
    return sdk.responses.create(model=MODEL, input="Sure?", previous_response_id=first.id).output_text


@client("openai", "responses.stream and .parse")
def openai_stream(url: str) -> object:
    import openai
    from pydantic import BaseModel

    class Colour(BaseModel):
        is_red: bool

    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    with sdk.responses.stream(model=MODEL, input="Hi") as stream:
        assert [event.type for event in stream][-1] == "response.completed"
    return sdk.responses.parse(model=MODEL, input="Is it red?", text_format=Colour).output_parsed


@client("openai", "completions.create, streamed")
def openai_completions(url: str) -> object:
    import openai

    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    chunks = sdk.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=5, stream=True)
    return sum(len(chunk.choices) for chunk in chunks)


@client("instructor", "default mode")
def instructor_default(url: str) -> object:
    import instructor
    import openai
    from pydantic import BaseModel

    class Colour(BaseModel):
        is_red: bool

    sdk = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY))
    asked: Any = [{"role": "user", "content": "Is it red?"}]
    return sdk.chat.completions.create(model=MODEL, messages=asked, response_model=Colour)


@client("instructor", "from_provider")
def instructor_provider(url: str) -> object:
    import instructor
    from pydantic import BaseModel

    class Colour(BaseModel):
        is_red: bool

    sdk = instructor.from_provider(f"openai/{MODEL}", base_url=f"{url}/v1", api_key=KEY)
    asked: Any = [{"role": "user", "content": "Is it red?"}]
    return sdk.chat.completions.create(messages=asked, response_model=Colour)


@client("pydantic_ai", "default output_type, with an image")
def pydantic_ai_output(url: str) -> object:
    from pydantic import BaseModel
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Colour(BaseModel):
        is_red: bool

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    agent = Agent(model, output_type=Colour)
    return agent.run_sync(["Is it red?", BinaryContent(png(), media_type="image/png")]).output


@client("pydantic_ai", "a tool, over Responses")
def pydantic_ai_tool(url: str) -> object:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"sunny in {city}"

    try:
        return agent.run_sync("Weather in Bonn?", usage_limits=UsageLimits(request_limit=3)).output
    except UsageLimitExceeded:
        return "the model called the tool until it was stopped"


@client("langchain_openai", "bind_tools and with_structured_output")
def langchain_tools(url: str) -> object:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY)  # type: ignore[arg-type]
    called = chat.bind_tools([Weather], tool_choice="required").invoke("Weather in Bonn?")
    return called.tool_calls, chat.with_structured_output(Weather).invoke("Weather in Bonn?")


@client("langgraph", "an agent's step")
def langgraph_agent(url: str) -> object:
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.prebuilt import create_react_agent

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY)  # type: ignore[arg-type]
    agent = create_react_agent(chat, [weather])
    try:
        found = agent.invoke({"messages": [("user", "Weather in Bonn?")]}, {"recursion_limit": 8})
        return len(found["messages"])
    except GraphRecursionError:
        return "the model called the tool until it was stopped"


@client("llama_index.llms.openai_like", "structured_predict and complete")
def llama_index_predict(url: str) -> object:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    settings: Any = {"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY}
    chat = OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True)
    predicted = chat.structured_predict(Weather, PromptTemplate("Weather in Bonn?"))
    return predicted, OpenAILike(**settings, is_chat_model=False).complete("Once upon").text[:40]


@client("litellm", "completion with an image, responses, text_completion")
def litellm_all(url: str) -> object:
    import litellm

    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": image_uri()}},
    ]
    settings: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    chat = litellm.completion(messages=[{"role": "user", "content": content}], **settings)
    response = litellm.responses(input="Hi", **settings)
    settings["model"] = f"text-completion-openai/{MODEL}"
    text = litellm.text_completion(prompt="Once", max_tokens=5, **settings)
    return chat.choices[0].message.content, response.status, text.choices[0].finish_reason


@client("llm", "a prompt with an attachment")
def llm_attachment(url: str) -> object:
    with tempfile.TemporaryDirectory() as home:
        Path(home, "extra-openai-models.yaml").write_text(
            f"- model_id: here\n  model_name: {MODEL}\n  api_base: {url}/v1\n  vision: true\n"
        )
        Path(home, "red.png").write_bytes(png())
        command = [
            str(Path(sys.executable).with_name("llm")),
            "-m",
            "here",
            "What is it?",
            "-a",
            f"{home}/red.png",
        ]
        environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": KEY}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


def _version(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module.split(".")[0], [])
    return importlib.metadata.version(names[0]) if len(names) == 1 else ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main(url: str) -> int:
    failed = 0
    for shows, (module, run) in CLIENTS.items():
        if not _is_installed(module):
            print(f"-    {shows}: not installed", flush=True)
            continue
        try:
            outcome = f"ok   {shows} ({_version(module)}): {run(url)!r:.120}"
        except Exception as error:
            failed += 1
            outcome = f"FAIL {shows} ({_version(module)}): {type(error).__name__}: {error!s:.400}"
        print(outcome.replace("\n", " "), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/")))
