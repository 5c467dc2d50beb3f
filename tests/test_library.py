"""`from vlm import Client, Model`: one behaviour, whether a server answers or a model in this process."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from live_serve import LiveServe, vlm_serve
from PIL import Image

from vlm import AsyncModel, Client, Model, VlmError

ROOT = Path(__file__).resolve().parent.parent
INVOICE = ROOT / "vlm/samples/invoice.png"
Opened = Client | Model


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServe]:
    with vlm_serve(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(params=["client", "model"], scope="module")
def opened(request: pytest.FixtureRequest, live: LiveServe) -> Iterator[Opened]:
    with Client(live.url) if request.param == "client" else Model() as asked:
        yield asked


def test_an_image_is_a_path_bytes_or_a_picture(opened: Opened) -> None:
    answers = [
        opened.ask(image, "What is the total?")
        for image in (INVOICE, str(INVOICE), INVOICE.read_bytes(), Image.open(INVOICE))
    ]
    assert {answer.text for answer in answers} == {"258.92"}
    assert {answer.finish_reason for answer in answers} == {"stop"}
    with pytest.raises(TypeError, match="not int"):
        opened.ask(3, "What?")  # type: ignore[arg-type]


def test_a_second_question_reads_the_image_from_the_cache(opened: Opened) -> None:
    opened.ask(INVOICE, "What is the date?")
    again = opened.ask(INVOICE, "Who is the seller?")
    assert again.text == "Ze Deli" and again.cached_tokens > again.image_tokens / 2 > 0


def test_pieces_of_a_stream_are_the_answer(opened: Opened) -> None:
    whole = opened.ask(INVOICE, "What is in the image?")
    pieces = list(opened.stream(INVOICE, "What is in the image?"))
    assert len(pieces) > 3 and "".join(pieces) == whole.text


def test_a_stream_that_is_left_ends_and_the_next_question_is_answered(opened: Opened) -> None:
    for _ in opened.stream(INVOICE, "Read the text.", max_tokens=200):
        break
    assert opened.ask(INVOICE, "What is the total?").text == "258.92"


def test_the_cost_is_that_of_the_answer(opened: Opened) -> None:
    images = [INVOICE, ROOT / "vlm/samples/shapes.png"]
    cost = opened.cost(images, "What is the total?", detail="high")
    answer = opened.ask(images, "What is the total?", detail="high", max_tokens=1)
    assert (cost.prompt_tokens, cost.image_tokens) == (answer.prompt_tokens, answer.image_tokens)
    assert cost.tiles > len(images) and cost.kv_bytes > 0


def test_a_schema_binds_the_answer(opened: Opened) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "number"}}, "required": ["total"]}
    assert isinstance(
        opened.ask(INVOICE, "Give the fields as JSON.", schema=schema).json()["total"], int | float
    )
    assert "total" in opened.caption(INVOICE, "fields").json()


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda opened: opened.ask(b"no image", "What?"), VlmError),
        (lambda opened: opened.caption(INVOICE, "poem"), ValueError),
        (lambda opened: opened.ask(INVOICE, " "), ValueError),
        (lambda opened: opened.ask(ROOT / "none.png", "What?"), OSError),
        (lambda opened: opened.ask(INVOICE, "What?", schema={"type": "nothing"}), VlmError),
    ],
)
def test_what_can_not_be_asked_is_refused_and_the_next_question_answered(
    opened: Opened, ask: Callable[[Opened], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(opened)
    assert opened.ask(INVOICE, "What is the total?").text == "258.92"


def test_the_codes_of_errors_are_those_of_the_api(opened: Opened) -> None:
    with pytest.raises(VlmError) as refused:
        opened.ask(b"no image", "What?")
    assert refused.value.code == "unsupported_image_format"


def test_threads_share_one(opened: Opened) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: opened.ask(INVOICE, "What is the total?").text, range(8)))
    assert answers == ["258.92"] * 8


def test_a_model_that_was_never_asked_loads_nothing() -> None:
    async def main() -> None:
        model = AsyncModel()
        assert (await model.cost(INVOICE)).image_tokens > 0
        await model.close()

    asyncio.run(main())


def test_the_name_of_the_package_alone_imports_nothing_heavy() -> None:
    code = "import sys, vlm; print(sorted({'torch', 'httpx', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_snippets_of_the_page_run_as_they_stand(live: LiveServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    snippets = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE
    )
    printed = io.StringIO()
    with redirect_stdout(printed):
        for snippet in snippets:
            code = snippet.replace("http://127.0.0.1:8000", live.url)
            exec(compile(code, "python.md", "exec"), {"__name__": "__main__"})
    lines = printed.getvalue()
    assert "258.92" in lines and "invoice.png An invoice from Ze Deli" in lines and json.dumps(lines)
