"""No file ends a run: whatever an exception is, and wherever a file's content raises it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import FakeEngine, fake_pipeline, png, rows_of, run, tiff
from fake_engine_client import ask, live_server
from fake_engine_client import png as sized_png

from llm.request import Event, Request, SamplingParams
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.types import ImageError, ImageInfo
from vlm.caption import caption_runner, input_documents
from vlm.caption.input_documents import DocumentReader
from vlm.caption.page_answers import PageAnswerer, PageWork
from vlm.caption.rows import INTERNAL, PageRef, RowContext
from vlm.cli import tokens
from vlm.cli.errors import BAD_INPUT, FAILURE, PARTIAL
from vlm.cli.errors import run as run_command
from vlm.cli.images import naming
from vlm.cli.main import app
from vlm.headers import read_header
from vlm.pipeline import Pipeline

UNFORESEEN: list[Callable[[], Exception]] = [
    lambda: OverflowError("Python int too large to convert to C ssize_t"),
    lambda: RecursionError("maximum recursion depth exceeded"),
    lambda: MemoryError(),
    lambda: AssertionError(),
    lambda: KeyError("secret"),
    lambda: OSError(24, "Too many open files"),
    lambda: UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
]
ENDING: list[Callable[[], BaseException]] = [
    KeyboardInterrupt,
    lambda: SystemExit(3),
    asyncio.CancelledError,
]


def name_of(make_error: Callable[[], BaseException]) -> str:
    return type(make_error()).__name__


def offsets_of_2_to_the_63() -> bytes:
    """A BigTIFF whose first directory stands beyond what any buffer holds."""
    return struct.pack("<4sHHQ", b"II+\0", 8, 0, 2**63 + 16) + bytes(64)


def raising(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """`await owner.name(...)` raises for what is called bad."""
    real = getattr(owner, name)

    async def instead(*arguments: Any, **options: Any) -> Any:
        if any("bad.png" in str(argument) for argument in arguments):  # no address spells it
            raise error
        return await real(*arguments, **options)

    monkeypatch.setattr(owner, name, instead)


def raising_in_thread(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    real = getattr(owner, name)

    def instead(path: str, *arguments: Any) -> Any:
        if "bad" in path:
            raise error
        return real(path, *arguments)

    monkeypatch.setattr(owner, name, instead)


def in_identify(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    raising(monkeypatch, DocumentReader, "identify", error)


def in_open(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    raising(monkeypatch, DocumentReader, "open", error)


def in_loading(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    raising_in_thread(monkeypatch, input_documents, "_image", error)


def in_preparing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real = Pipeline.prepare

    def prepare(self: Pipeline, *arguments: Any, **options: Any) -> Any:
        prepared = real(self, *arguments, **options)
        if prepared.images[0].info.width == 128:  # the bad page's
            raise error
        return prepared

    monkeypatch.setattr(Pipeline, "prepare", prepare)


PLACES = [in_identify, in_open, in_loading, in_preparing]


def write_inputs() -> None:
    """A bad file among good ones: its page is 128 pixels wide, theirs 96."""
    Path("in/a.png").write_bytes(png(1))
    Path("in/bad.png").write_bytes(png(2, (128, 96)))
    Path("in/c.png").write_bytes(png(3))
    Path("in/d.tif").write_bytes(tiff([4, 5]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make_error", UNFORESEEN, ids=name_of)
def test_an_exception_that_nobody_foresaw_is_one_error_row_and_one_log_line(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: Callable[[pytest.MonkeyPatch, BaseException], None],
    make_error: Callable[[], Exception],
) -> None:
    write_inputs()
    error = make_error()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        place(patch, error)
        stats = run(out)
    rows = {row["path"]: row for row in rows_of(out) if row["path"] != "in/d.tif"}
    assert rows["in/bad.png"]["error"] == dict(zip(("code", "message"), INTERNAL, strict=True))
    assert stats.errors == 1 and "text" in rows["in/a.png"] and "text" in rows["in/c.png"]
    assert len(rows_of(out)) == 5
    (record,) = [record for record in caplog.records if record.name.startswith("vlm.caption")]
    assert "bad.png" in record.getMessage() and record.exc_info and record.exc_info[0] is type(error)
    again = run(out)
    assert (again.errors, again.errors_kept, again.pages_done) == (0, 0, 1), "a later run tries again"


@pytest.mark.parametrize("make_error", ENDING, ids=name_of)
def test_what_ends_the_program_is_not_taken_for_a_file_s_fault(
    monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], BaseException]
) -> None:
    async def fail(*arguments: Any) -> Any:
        raise make_error()

    error = type(make_error())
    with pytest.raises(error):
        input_documents.outcome("a.png", fail()).send(None)
    monkeypatch.setattr(PageAnswerer, "_generate", fail)
    context = RowContext("q", "caption", "fake", "r")
    work = PageWork(PageRef("a.png", 1, 1, "f"), context, "i", [], SamplingParams())
    with pytest.raises(error):
        PageAnswerer(fake_pipeline(FakeEngine()), None)._guarded(work).send(None)  # type: ignore[arg-type]
    with pytest.raises(error), naming(Path("a.png"), b""):
        raise make_error()


def test_an_engine_client_that_raises_what_nobody_foresaw_costs_one_page(out: Path) -> None:
    for number in range(3):
        Path(f"in/{number}.png").write_bytes(png(number))
    calls = iter(range(99))

    def fail_once(request: Request) -> Event | None:
        if next(calls) == 1:
            raise ZeroDivisionError
        return None

    assert run(out, engine=FakeEngine(fail_once)).errors == 1
    assert len(rows_of(out)) == 3


def test_a_line_of_a_batch_file_that_raises_is_its_own_error_row(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    names = ("one", "bad parse", "bad chat", "two")
    Path("batch.jsonl").write_text("".join(json.dumps(line | {"custom_id": name}) + "\n" for name in names))
    with monkeypatch.context() as patch:
        for function, name in (("_parse", "bad parse"), ("to_chat", "bad chat")):
            real = getattr(caption_runner, function)

            def instead(given: Any, real: Any = real, name: str = name, **options: Any) -> Any:
                if name in str(given):
                    raise OverflowError
                return real(given, **options)

            patch.setattr(caption_runner, function, instead)
        run(out, "batch.jsonl")
    codes = {row["page"]: row.get("error", {}).get("code") for row in rows_of(out)}
    assert codes == {1: None, 2: "internal_error", 3: "internal_error", 4: None}


def test_a_fault_of_the_output_still_ends_the_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs()

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        run(out, compact=False)


def test_numbers_of_strangers_end_no_run(out: Path) -> None:
    write_inputs()
    Path("in/bad.png").unlink()
    Path("in/z.tif").write_bytes(offsets_of_2_to_the_63())
    assert run(out).errors == 1
    assert len(rows_of(out)) == 5 and run(out, engine=FakeEngine()).pages_done <= 1


@pytest.mark.parametrize("make_error", UNFORESEEN[:2] + UNFORESEEN[3:], ids=name_of)
def test_a_header_is_read_or_refused_with_a_fixed_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make_error: Callable[[], Exception]
) -> None:
    def probing(data: bytes, limits: ImageLimits | None = None) -> None:
        raise make_error()

    monkeypatch.setattr("vlm.headers.probe", probing)
    with pytest.raises(ImageError) as caught:
        read_header(b"anything")
    assert caught.value.code == "invalid_image" and "damaged" in caught.value.message
    assert caplog.records[-1].exc_info


def test_a_machine_without_memory_is_no_damaged_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def probing(data: bytes, limits: ImageLimits | None = None) -> None:
        raise MemoryError

    monkeypatch.setattr("vlm.headers.probe", probing)
    with pytest.raises(MemoryError):
        read_header(b"anything")


def test_over_http_such_an_image_is_the_client_s_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 500 would be asked again three times."""

    def probing(data: bytes, limits: ImageLimits | None = None) -> ImageInfo:
        if len(data) < 100:
            raise OverflowError("secret")
        return probe(data, limits)

    monkeypatch.setattr("vlm.headers.probe", probing)
    with live_server() as server, server.client() as client:
        for refused in (
            client.post("/v1/chat/completions", json=ask(offsets_of_2_to_the_63(), "What?")),
            client.post(
                "/v1/images",
                content=offsets_of_2_to_the_63(),
                headers={"content-type": "application/octet-stream"},
            ),
        ):
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["code"] == "invalid_image" and "secret" not in refused.text and error["param"]
        assert client.post("/v1/chat/completions", json=ask(sized_png(90, 90), "What?")).status_code == 200


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, list[str]]:
    """(exit code, stdout, lines of stderr)"""
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: app(list(arguments), standalone_mode=False, prog_name="vlm"))
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err.splitlines()


def test_the_other_images_of_a_command_line_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(png(1))
    bad.write_bytes(png(2))

    def cost(spec: Any, data: bytes, detail: Any) -> Any:
        if data == png(2):
            raise OverflowError("int too large")
        return real(spec, data, detail)

    real = tokens.image_cost
    monkeypatch.setattr(tokens, "image_cost", cost)
    code, out, errors = call(capsys, "tokens", str(bad), str(good))
    assert code == PARTIAL and "good.png" in out
    assert [line for line in errors if "too large" in line] == []
    assert f"vlm: {bad}: the image could not be processed because of a fault on our side" in errors
    code, out, errors = call(capsys, "tokens", str(bad))
    assert code == FAILURE and out == ""


def test_ask_names_the_image_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.tif"
    path.write_bytes(offsets_of_2_to_the_63())
    code, _, errors = call(capsys, "ask", str(path), "What?")
    assert code == BAD_INPUT and errors[-1].startswith(f"vlm: {path}: The image is damaged")

    def plan(self: Pipeline, image: Any) -> None:
        raise OverflowError("int too large")

    monkeypatch.setattr(Pipeline, "plan_image", plan)
    path = tmp_path / "good.png"
    path.write_bytes(png(1))
    code, _, errors = call(capsys, "ask", str(path), "What?")
    assert code == FAILURE and errors[-1].startswith(f"vlm: {path}: the image could not be processed")
    assert not any("too large" in line for line in errors)
