"""Names of files are bytes: rows, tables and headings stay whole whatever they are made of."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import FakeEngine, fake_pipeline, png, rows_of, run, tiff
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Timings, Usage
from vlm.caption.caption_job import CaptionJob, run_job
from vlm.caption.caption_progress import summary, summary_lines
from vlm.caption.inputs import Skipped
from vlm.caption.journal import Journal
from vlm.caption.presets import make_question
from vlm.caption.rows import PageRef, Row, RowContext, decode, encode, error_row, page_row
from vlm.caption.stats import RunStats
from vlm.caption.views.formats import write_rows, write_view
from vlm.cli.file_names import as_text, one_line, percent_decoded, percent_encoded

CONTEXT = RowContext("q" * 32, "caption", "fake", "r" * 32)
ODD = [
    b"caf\xe9",  # Latin 1
    b"caf\\xe9",  # what the one above it is shown as
    "caf\u00e9".encode(),
    b"\xff\xfe",
    b"line\nbreak",
    b"line\r\nbreak",
    "line\u2028separated".encode(),
    "next\u0085line".encode(),
    b"bell\x07 and \x1b[31mcolour",
    b"\xe2\x80\xaegnp",  # turns the direction of what follows
    b"# | ``` > [x](y)",
    b'=1+1,"quoted"',
    b"50% {name} {0} %s",
    "\U0001f9fe \u8bf7\u6c42".encode(),
    b"  spaces  ",
    b"- -o",
    b"\xed\xa0\x80",  # half a character, as some programs write it
]
NAMES = st.binary(min_size=1, max_size=12).map(lambda name: os.fsdecode(name.replace(b"/", b"_")))


def name_all(names: list[bytes]) -> list[str]:
    paths = [os.fsdecode(b"in/" + name + b".png") for name in names]
    for number, path in enumerate(paths):
        Path(path).write_bytes(png(number))
    return paths


def row(path: str, text: str = "text", page: int = 1, **more: Any) -> Row:
    ref = PageRef(path, page, 2, "f" * 64, **more)
    return page_row(ref, CONTEXT, "i" * 64, text, "stop", Usage(9, 4, 2, 3), Timings(total_ms=12.5))


def strict_lines(data: bytes) -> list[dict[str, Any]]:
    """As a reader that knows no Python would: UTF-8, whole characters, a line at any line break."""
    found = [json.loads(line) for line in data.decode("utf-8").splitlines()]
    json.dumps(found, ensure_ascii=False).encode("utf-8")
    return found


def path_of(shown: dict[str, Any]) -> str:
    return percent_decoded(shown["path_quoted"]) if shown.get("path_quoted") else str(shown["path"])


def test_every_name_gets_one_row_and_a_second_run_does_nothing(out: Path) -> None:
    paths = name_all(ODD)
    run(out)
    written = out.read_bytes()
    rows = strict_lines(written)
    assert sorted(map(path_of, rows)) == sorted(paths)
    assert len({row["path"] for row in rows}) >= len(paths) - 1, "two names are shown alike at most"
    engine = FakeEngine()
    stats = run(out, engine=engine)
    assert (stats.pages_kept, stats.pages_done) == (len(paths), 0)
    assert not engine.submitted and out.read_bytes() == written


@pytest.mark.parametrize("form", ["csv", "md"])
def test_tables_and_headings_hold_every_name_and_resume(
    out: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = name_all(ODD)
    output = out.with_suffix(f".{form}")
    job = CaptionJob(("in",), output, make_question(preset="caption"))
    numbers = run_job(job, lambda: fake_pipeline(FakeEngine()))
    assert numbers["pages"] == len(paths)
    text = output.read_bytes().decode("utf-8")
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        assert sorted(map(path_of, rows)) == sorted(paths)
        assert all(row["finish_reason"] == "stop" and None not in row for row in rows)
    else:
        lines = re.split(r"\r\n|\r|\n", text)
        assert sum(line.startswith("## ") for line in lines) == len(paths)
        assert all(line == "" or line.startswith(("## ", "> ")) for line in lines)
    printed = capsys.readouterr().err
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", printed)
    engine = FakeEngine()
    run_job(job, lambda: fake_pipeline(engine))
    assert not engine.submitted and output.read_bytes().decode("utf-8") == text


def test_pages_of_a_named_document_and_error_rows_too(out: Path) -> None:
    name = os.fsdecode(b"in/caf\xe9\n.tif")
    Path(name).write_bytes(tiff([1, 2]))
    bad = os.fsdecode(b"in/\xff.png")
    Path(bad).write_bytes(b"junk")
    run(out)
    rows = strict_lines(out.read_bytes())
    assert sorted((path_of(row), row["page"]) for row in rows) == [(name, 1), (name, 2), (bad, 1)]
    Path(name).write_bytes(tiff([3]))
    run(out)
    assert sorted((path_of(row), row["page"]) for row in rows_of(out)) == [(name, 1), (bad, 1)]


def test_an_output_with_raw_bytes_is_continued_and_mended(out: Path) -> None:
    """As earlier versions wrote it."""
    paths = name_all([b"caf\xe9", b"good"])
    run(out)
    raw = b""
    for line in out.read_bytes().splitlines():
        found = json.loads(line)
        path = path_of(found)
        found.pop("path_quoted", None)
        plain = json.dumps(found | {"path": path}, ensure_ascii=False)
        raw += plain.encode("utf-8", "surrogateescape") + b"\n"
    out.write_bytes(raw)
    with pytest.raises(UnicodeDecodeError):
        raw.decode("utf-8")
    engine = FakeEngine()
    assert run(out, engine=engine).pages_kept == 2 and not engine.submitted
    assert sorted(map(path_of, strict_lines(out.read_bytes()))) == sorted(paths)


@given(NAMES, st.text(max_size=20))
@settings(deadline=None)
def test_a_row_comes_back_from_its_line(path: str, text: str) -> None:
    line = encode(row(path, text))
    assert line.endswith(b"\n") and len(line.decode("utf-8").splitlines()) == 1
    (shown,) = strict_lines(line)
    assert path_of(shown) == path and shown["text"] == text
    assert decode(line) == row(path, text)


@given(st.lists(st.tuples(NAMES, st.text(st.characters(codec="utf-8"), max_size=8)), max_size=4))
@settings(deadline=None)
def test_csv_and_markdown_take_any_name_and_answer(rows: list[tuple[str, str]]) -> None:
    made = [row(path, text, page) for page, (path, text) in enumerate(rows)]
    table, document = io.StringIO(newline=""), io.StringIO(newline="")
    write_rows(table, "csv", made)
    write_rows(document, "md", made)
    found = list(csv.DictReader(io.StringIO(table.getvalue(), newline="")))
    assert [path_of(shown) for shown in found] == [path for path, _ in rows]
    lines = re.split(r"\r\n|\r|\n", document.getvalue())
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(rows)) + bool(rows)
    assert sum(line.startswith("## ") for line in lines) == changes
    document.getvalue().encode("utf-8")


def test_an_answer_with_half_a_character_spoils_no_table(out: Path) -> None:
    """A model's JSON may escape one."""
    answer = json.dumps({"total": "\ud83d"})
    path = out.with_suffix(".csv")
    write_view(path, "csv", [row("a.png", answer)], '{"type": "object", "properties": {"total": {}}}')
    (found,) = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8"), newline=""))
    assert found["field.total"] == "?" and found["text"] == answer


@given(NAMES)
def test_a_name_is_shown_in_one_line_that_can_be_written(name: str) -> None:
    assert len(one_line(name).splitlines()) <= 1
    one_line(name).encode("utf-8")
    as_text(name).encode("utf-8")
    assert percent_encoded(name).isascii() and percent_decoded(percent_encoded(name)) == name
    assert one_line("\ud800") == "\\ud800"


@pytest.mark.parametrize(
    "damage",
    [
        {"page": 10**30},
        {"page": -1},
        {"page_count": 10**30},
        {"path": "\ud800"},
        {"question": "\ud800"},
        {"model_revision": None},
        {"usage": None},
        {"finish_reason": 3},
        {"warning": "oh"},
        {"error": {"code": 1}, "text": None},
    ],
    ids=str,
)
def test_a_row_that_somebody_spoiled_is_done_again(out: Path, damage: dict[str, Any]) -> None:
    for number in range(2):
        Path(f"in/{number}.png").write_bytes(png(number))
    run(out)
    first, second = rows_of(out)
    out.write_text(f"{json.dumps(first)}\n{json.dumps(second | damage)}\n")
    stats = run(out)
    assert (stats.pages_kept, stats.pages_done) == (1, 1)
    assert sorted(row["path"] for row in rows_of(out)) == ["in/0.png", "in/1.png"]


def test_the_summary_names_files_in_one_line_each() -> None:
    stats = RunStats()
    path = os.fsdecode(b"a\n\x1b[31m\xe9.png")
    stats.add(row(path))
    numbers = summary(stats, Skipped(1, [path]), "out\n.jsonl", finished=True)
    lines = summary_lines(numbers, [path])
    assert all(line.isprintable() for line in lines)
    json.dumps(numbers, ensure_ascii=False).encode("utf-8")


def test_a_journal_reads_what_an_error_row_with_such_a_name_says(tmp_path: Path) -> None:
    path = os.fsdecode(b"\xff\n.png")
    made = error_row(PageRef(path, 1, 1, "f" * 64), CONTEXT, "invalid_image", "The image is damaged.")
    (tmp_path / "out.jsonl").write_bytes(encode(made))
    journal = Journal(tmp_path / "out.jsonl")
    assert [found["path"] for found in journal.rows()] == [path]
    journal.close()
