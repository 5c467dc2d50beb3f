"""`vlm ask` and `vlm caption` with --url: a running server answers as this process would."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import rows_of
from fake_engine_client import FakeEngine, LiveServer, live_server, png
from hypothesis import given
from hypothesis import strategies as st
from test_documents import PDF
from typer.testing import CliRunner

from llm.request import SamplingParams
from vlm.api.guard.auth import KeyRing
from vlm.api.guard.keys import ApiKey
from vlm.cli.errors import CommandError
from vlm.cli.main import app
from vlm.config import ServeConfig
from vlm.pipeline import ChatMessage
from vlm.remote.chat_body import chat_body
from vlm.remote.remote_server import RemoteServer, ServerError
from vlm.requests.params import check_supported, parsed_chat, sampling_params


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(60 + number, 40))
    (tmp_path / "a.pdf").write_bytes(PDF)
    return tmp_path


def vlm(*arguments: object) -> str:
    """Stdout. Raises what the command raises."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@given(
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 1000),
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 100),
        top_p=st.floats(0.1, 1),
        seed=st.none() | st.integers(0, 1000),
        n=st.integers(1, 4),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
        logit_bias=st.sampled_from([(), ((5, -1.0),)]),
        skip_special_tokens=st.none() | st.booleans(),
        constraint=st.sampled_from(
            [None, ("json_object", ""), ("regex", "a+"), ("json_schema", '{"type":"object"}')]
        ),
    )
)
def test_a_body_means_the_settings_it_was_made_of(params: SamplingParams) -> None:
    request = parsed_chat(chat_body([ChatMessage("user", ("Hi",))], params))
    check_supported(request)
    assert sampling_params(request, ServeConfig()) == params


def test_each_question_is_answered_by_the_server(server: LiveServer, folder: Path) -> None:
    told = vlm(
        "ask",
        folder / "0.png",
        folder / "a.pdf",
        "-q",
        "One?",
        "-q",
        "Two?",
        "--url",
        server.url,
        "--pages",
        "1",
        "--json",
    )
    answers = json.loads(told)["answers"]
    assert [answer["question"] for answer in answers] == ["One?", "Two?"]
    assert all(answer["answer"].startswith("I saw 2 images") for answer in answers)
    assert answers[0]["usage"]["image_tokens"] > 0 and answers[0]["timings"]["total_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "can't be reached"),
        (["--url", "nowhere"], "no http:// or https:// address"),
        (["--url", "URL", "--model", "other"], "does not serve this model"),
        (["--url", "URL", "--threads", "2"], "--threads is the server's own setting"),
        (["--url", "URL", "--max-pixels", "5000"], "'max_pixels' is not available"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    server: LiveServer, folder: Path, arguments: list[str], said: str
) -> None:
    given = [server.url if argument == "URL" else argument for argument in arguments]
    for command in (
        ["ask", folder / "0.png", "What?"],
        ["caption", folder / "0.png", "-o", folder / "rows.jsonl"],
    ):
        if "--max-pixels" in given and command[0] == "caption":
            continue  # a row of its own there
        if "--model" in given and command[0] == "caption":
            given = [*given, "--quiet"]
        with pytest.raises(CommandError, match=said):
            vlm(*command, *given)


def test_an_image_that_is_refused_is_named(server: LiveServer, folder: Path) -> None:
    (folder / "torn.png").write_bytes(png()[:40])
    with pytest.raises(CommandError, match=r"torn\.png: "):
        vlm("ask", folder / "0.png", folder / "torn.png", "What?", "--url", server.url)


def test_pages_are_captioned_by_the_server_once(server: LiveServer, folder: Path) -> None:
    output = folder / "rows.jsonl"
    command = ["caption", folder, "-o", output, "--url", server.url, "--quiet", "--json"]
    first = json.loads(vlm(*command))
    rows = rows_of(output)
    assert first["errors"] == 0 and len(rows) == first["pages"] >= 4
    assert all(row["text"].startswith("I saw 1 images") for row in rows)
    asked = len(server.engine.submitted)
    assert {request.priority for request in server.engine.submitted[-3:]} == {"batch"}
    assert json.loads(vlm(*command))["errors"] == 0
    assert len(server.engine.submitted) == asked and rows_of(output) == rows


def test_a_key_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyRing([ApiKey("a", hashlib.sha256(b"secret").hexdigest(), "a")])
    with live_server(FakeEngine(), keys=keys) as running:
        command: list[Any] = ["ask", folder / "0.png", "What?", "--url", running.url]
        with pytest.raises(CommandError, match="A valid API key is required"):
            vlm(*command)
        monkeypatch.setenv("VLM_API_KEY", "secret")
        assert vlm(*command).startswith("I saw 1 images")


def test_a_busy_server_is_asked_again_while_there_is_patience(server: LiveServer) -> None:
    async def answered(patience_s: float) -> str:
        remote = RemoteServer(server.url, patience_s)
        try:
            asyncio.get_running_loop().call_later(0.3, setattr, server.engine, "ready", True)
            server.engine.ready = False
            return (await remote.answer(chat_body([ChatMessage("user", ("Hi",))], SamplingParams()))).text
        finally:
            server.engine.ready = True
            await remote.close()

    assert asyncio.run(answered(30.0)).startswith("I saw 0 images")
    with pytest.raises(ServerError) as caught:
        asyncio.run(answered(0.0))
    assert caught.value.code == "engine_unavailable" and not caught.value.is_clients
