"""Documents in a chat and on the command line: their pages are images, counted, chosen and capped."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from fake_engine_client import LiveServer, data_uri, image_part, live_server, model_spec, png
from pdf_files import pdf_of, stream
from PIL import Image

from llm.request import Timings, Usage
from preprocess.limits import ImageLimits
from preprocess.types import ImageError
from vlm.api.chat import parts
from vlm.cli.ask import Reply
from vlm.cli.errors import run
from vlm.cli.main import app
from vlm.config import ServeConfig
from vlm.pipeline import ImageInput
from vlm.requests.documents import DocumentPages
from vlm.requests.errors import ApiError, invalid
from vlm.requests.media import Stored
from vlm.requests.page_range import PageRange

CHAT, ESTIMATE = "/v1/chat/completions", "/v1/estimate"


def pdf(*sizes: tuple[int, int]) -> bytes:
    """A page of each size, in points."""
    kids = " ".join(f"{3 + 2 * index} 0 R" for index in range(len(sizes)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(sizes)} >>",
    ]
    for index, (width, height) in enumerate(sizes):
        box = f"/MediaBox [0 0 {width} {height}]"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R {box} /Contents {4 + 2 * index} 0 R /Resources << >> >>"
        )
        objects.append(stream(f"0.{index} 0 0 rg 10 10 40 40 re f"))
    return pdf_of(objects)


def tiff(*sizes: tuple[int, int]) -> bytes:
    pages = [Image.new("RGB", size, (9 * index, 0, 0)) for index, size in enumerate(sizes)]
    out = io.BytesIO()
    pages[0].save(out, "TIFF", save_all=True, append_images=pages[1:])
    return out.getvalue()


SIZES = [(96, 48), (48, 96), (192, 48)]  # points; 150 dpi make 200 x 100, 100 x 200, 400 x 100 pixels
PIXELS = [(200, 100), (100, 200), (400, 100)]
PDF, TIFF = pdf(*SIZES), tiff(*PIXELS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("data")
    with live_server(config=ServeConfig(data_dir=str(folder), max_images_per_request=4)) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]}


def file_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": "a", "file_data": data_uri(data, "application/pdf"), **more}}


def sizes(client: httpx.Client, *parts: dict[str, Any]) -> list[tuple[int, int]]:
    answer = client.post(ESTIMATE, json=chat(*parts))
    assert answer.status_code == 200, answer.text
    return [(image["width"], image["height"]) for image in answer.json()["images"]]


@pytest.mark.parametrize("data", [PDF, TIFF])
def test_pages_are_images_and_all_that_they_cost_is_told(
    server: LiveServer, client: httpx.Client, data: bytes
) -> None:
    assert sizes(client, file_part(data)) == PIXELS
    assert sizes(client, file_part(data, pages="3,1")) == [PIXELS[2], PIXELS[0]]
    assert sizes(client, file_part(data, pages="2-")) == PIXELS[1:]
    estimate = client.post(ESTIMATE, json=chat(file_part(data))).json()
    made = client.post(CHAT, json=chat(file_part(data)))
    assert made.status_code == 200, made.text
    usage = made.json()["usage"]
    spec = model_spec()
    grids = [spec.preprocess.rule.grid(*size) for size in PIXELS]
    tokens = sum(spec.geometry.tokens_per_tile * grid.num_tiles for grid in grids)
    assert usage["prompt_tokens_details"]["image_tokens"] == tokens == estimate["image_tokens"]
    assert usage["prompt_tokens"] == estimate["prompt_tokens"]


def test_a_file_that_is_one_image_is_that_image(client: httpx.Client) -> None:
    data = png(30, 20)
    assert sizes(client, file_part(data)) == sizes(client, image_part(data)) == [(30, 20)]


def test_detail_holds_for_every_page(client: httpx.Client) -> None:
    answer = client.post(ESTIMATE, json=chat(file_part(PDF, detail="low")))
    assert [image["tiles"] for image in answer.json()["images"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("parts", "param", "code"),
    [
        ([file_part(PDF), file_part(TIFF)], "messages[0].content[1].file.file_data", "too_many_images"),
        ([file_part(PDF, pages="4")], "messages[0].content[0].file.file_data", "image_page_not_found"),
        ([file_part(PDF, pages="0")], "messages[0].content[0].file.pages", "invalid_value"),
        ([file_part(b"%PDF-1.7 rest")], "messages[0].content[0].file.file_data", "invalid_pdf"),
        ([file_part(b"text")], "messages[0].content[0].file.file_data", "unsupported_image_format"),
        ([{"type": "file", "file": {}}], "messages[0].content[0].file", "missing_required_parameter"),
        ([{"type": "file"}], "messages[0].content[0].file", "missing_required_parameter"),
        ([{"type": "input_file"}], "messages[0].content[0].type", "unsupported_content_part"),
    ],
)
def test_what_can_not_be_shown_is_refused_with_its_place(
    client: httpx.Client, parts: list[dict[str, Any]], param: str, code: str
) -> None:
    answer = client.post(CHAT, json=chat(*parts))
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert (error["param"], error["code"]) == (param, code)


def test_images_of_other_parts_count_before_a_document_is_drawn(client: httpx.Client) -> None:
    images = [image_part(png(8, 8))] * 2
    answer = client.post(CHAT, json=chat(file_part(PDF), *images))
    assert answer.json()["error"]["code"] == "too_many_images" and "1-2" in answer.json()["error"]["message"]
    assert len(sizes(client, file_part(PDF, pages="1-2"), *images)) == 4


@pytest.mark.parametrize("purpose", ["user_data", "vision", "batch"])
def test_uploaded_files_are_shown_by_id_unless_they_are_of_a_batch(server: LiveServer, purpose: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        document = official.files.create(file=("a.pdf", PDF), purpose=purpose).id
        image = official.files.create(file=("a.png", png(30, 20)), purpose=purpose).id
        asked: Any = chat(
            {"type": "file", "file": {"file_id": document}},
            {"type": "image_url", "image_url": {"url": image}},
        )["messages"]
        if purpose == "batch":
            with pytest.raises(openai.BadRequestError) as caught:
                official.chat.completions.create(model="vlm-default", messages=asked)
            assert caught.value.param == "messages[0].content[0].file.file_id"
            return
        made = official.chat.completions.create(model="vlm-default", messages=asked)
        assert "4 images" in str(made.choices[0].message.content)


def test_the_first_part_that_fails_is_named_and_the_others_are_not_loaded_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def load(service: Any, caller: Any, ref: parts.ImageRef) -> bytes:
        try:
            await asyncio.sleep({"first": 0.05, "second": 0, "third": 3600}[ref.param])
            raise invalid("invalid_value", "This part fails.", ref.param)
        finally:
            ended.append(ref.param)

    monkeypatch.setattr(parts, "_load", load)
    refs = [parts.ImageRef(Stored("img"), "auto", place) for place in ("first", "second", "third")]
    with pytest.raises(ApiError) as caught:
        asyncio.run(parts.resolve(cast(Any, None), cast(Any, None), refs))
    assert caught.value.param == "first"
    assert sorted(ended) == ["first", "second", "third"]


def test_a_documents_pages_are_drawn_once_and_the_same_however_often_they_are_asked_for() -> None:
    async def run() -> None:
        documents = DocumentPages(ImageLimits())
        drawn: list[int] = []
        render = documents._renderer.render

        async def counted(path: str, page: int) -> Any:
            drawn.append(page)
            return await render(path, page)

        documents._renderer.render = counted  # type: ignore[method-assign]
        try:
            first = await documents.split(PDF, most=3)
            again = await documents.split(PDF, PageRange.parse("2"), most=1)
            with pytest.raises(ImageError, match="3 pages"):
                await documents.split(PDF, most=2)
        finally:
            await documents.close()
        assert again == [first[1]] and drawn == [0, 1, 2]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "count", "pages"),
    [("2", 3, [1]), ("1-3", 3, [0, 1, 2]), ("2-, 1", 3, [1, 2, 0]), ("1-2,2-3", 3, [0, 1, 2])],
)
def test_ranges_name_pages_from_1_each_once(text: str, count: int, pages: list[int]) -> None:
    assert PageRange.parse(text).of(count, most=3) == pages


@pytest.mark.parametrize("text", ["", "0", "3-1", "a", "1,", "-2", "1-2-3", "1;2", "9" * 7, "1," * 200 + "1"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        PageRange.parse(text)


def test_ask_reads_documents_and_their_chosen_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pdf").write_bytes(PDF)
    asked: list[list[tuple[int, int]]] = []

    async def answer(pipeline: Any, images: list[bytes], question: str, params: Any) -> Any:
        infos = [pipeline.plan_image(ImageInput(data)).info for data in images]
        asked.append([(info.width, info.height) for info in infos])
        return Reply(question, "a", "stop", Usage(1, 1, 1, 1), Timings())

    monkeypatch.setattr("vlm.cli.ask.answer", answer)
    codes = []
    for more in ([], ["--pages", "2-"], ["--pages", "7"]):
        with pytest.raises(SystemExit) as ended:
            arguments = ["ask", str(tmp_path / "a.pdf"), "What?", *more]
            run(lambda arguments=arguments: app(arguments, standalone_mode=False))
        codes.append(ended.value.code)
    assert codes[:2] == [0, 0] and codes[2] not in (0, None)
    assert asked == [PIXELS, PIXELS[1:]] and "The document has 3 pages" in capsys.readouterr().err
