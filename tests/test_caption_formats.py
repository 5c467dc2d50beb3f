"""CSV and Markdown say what the rows say; the final view replaces the old one whole."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.request import Timings, Usage
from vlm.caption.rows import PageRef, Row, RowContext, error_row, page_row
from vlm.caption.views import doctags
from vlm.caption.views.formats import choose_format, journal_path, schema_fields, write_view

CONTEXT = RowContext("q" * 32, "caption", "fake", "r" * 32)
SCHEMA = '{"type":"object","properties":{"total":{"type":"string"},"lines":{"type":"array"}}}'


def row(text: str, path: str = "a.pdf", page: int = 1, count: int = 2) -> Row:
    ref = PageRef(path, page, count, "f" * 64)
    return page_row(ref, CONTEXT, "i" * 64, text, "stop", Usage(9, 4, 2, 3), Timings(total_ms=12.5))


def view(tmp_path: Path, form: str, rows: list[Row], schema: str = "") -> str:
    path = tmp_path / f"out.{form}"
    write_view(path, form, rows, schema)  # type: ignore[arg-type]
    return path.read_bytes().decode()


@pytest.mark.parametrize(
    ("name", "given_form", "form", "journal"),
    [
        ("a.jsonl", None, "jsonl", "a.jsonl"),
        ("a", None, "jsonl", "a"),
        ("a.CSV", None, "csv", "a.CSV.jsonl"),
        ("a.md", None, "md", "a.md.jsonl"),
        ("a.txt", "csv", "csv", "a.txt.jsonl"),
        ("a.txt", "jsonl", "jsonl", "a.txt"),
        ("a.ndjson", None, "jsonl", "a.ndjson"),
    ],
)
def test_the_format_follows_the_option_then_the_suffix(
    name: str, given_form: str | None, form: str, journal: str
) -> None:
    chosen = choose_format(Path(name), given_form)  # type: ignore[arg-type]
    assert chosen == form and journal_path(Path(name), chosen) == Path(journal)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=5))
def test_csv_gives_every_text_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    rows = [row(text, page=number) for number, text in enumerate(texts)]
    content = view(tmp_path_factory.mktemp("csv"), "csv", rows)
    assert [found["text"] for found in csv.DictReader(io.StringIO(content, newline=""))] == texts


def test_csv_has_columns_for_fields_usage_and_errors(tmp_path: Path) -> None:
    answer = json.dumps({"total": "9.50", "lines": ["a", 2], "more": 1})
    error = error_row(PageRef("b.png", 1, 1, "g" * 64), CONTEXT, "invalid_image", "The image is damaged.")
    content = view(tmp_path, "csv", [row(answer), row("not json", page=2), error], SCHEMA)
    first, second, third = csv.DictReader(io.StringIO(content))
    assert (first["field.total"], first["field.lines"]) == ("9.50", '["a", 2]')
    assert (first["page"], first["page_count"], first["cached_tokens"], first["total_ms"]) == (
        "1",
        "2",
        "2",
        "12.5",
    )
    assert second["field.total"] == "" and second["text"] == "not json"
    assert (third["error_code"], third["text"]) == ("invalid_image", "")
    assert schema_fields("") == []


def test_markdown_has_a_heading_per_document_and_page(tmp_path: Path) -> None:
    error = error_row(PageRef("b_1.png", 1, 1, "g" * 64), CONTEXT, "invalid_image", "The image is damaged.")
    content = view(tmp_path, "md", [row("# no heading\nline *two*"), row('{"a": "```"}', page=2), error])
    assert content == (
        "## a.pdf\n"
        "\n### Page 1 of 2\n"
        "\n> \\# no heading\\\n> line \\*two\\*\n"
        "\n### Page 2 of 2\n"
        '\n````json\n{"a": "```"}\n````\n'
        "\n## b\\_1.png\n"
        "\n**Failed (invalid\\_image):** The image is damaged.\n".replace("invalid\\_image", "invalid_image")
    )


def test_a_view_that_can_not_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    assert view(tmp_path, "csv", [row("old")])
    before = (tmp_path / "out.csv").read_bytes()

    def failing() -> Row:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_view(tmp_path / "out.csv", "csv", (failing() for _ in range(1)))
    assert (tmp_path / "out.csv").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_line_of_an_answer_stays_in_its_quote(tmp_path: Path, end: str) -> None:
    content = view(tmp_path, "md", [row(f"one{end}## two", count=1)])
    assert content == "## a.pdf\n\n> one\\\n> \\#\\# two\n"


TAGS = "<doctag><title>Bill</title><otsl><ched>A<ched>B<nl><fcel>1<fcel>2<nl></otsl></doctag>"


@pytest.fixture
def anew() -> Iterator[None]:
    doctags._is_installed.cache_clear()
    yield
    doctags._is_installed.cache_clear()


def test_doctags_are_shown_as_they_are_without_docling_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anew: None
) -> None:
    monkeypatch.setattr(doctags, "find_spec", lambda name: None)
    content = view(tmp_path, "md", [row(TAGS, count=1), row(TAGS, path="b", count=1)])
    assert content == f"## a.pdf\n\n```\n{TAGS}\n```\n\n## b\n\n```\n{TAGS}\n```\n"
    (said,) = caplog.messages
    assert said.endswith("pip install 'vlm-serve[docling]'")


def test_what_docling_core_makes_of_a_page_stays_in_its_quote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    made = iter(["## Bill\n\n| A |\n|---|\n", "", None])

    def load(pages: list[str], document_name: str) -> SimpleNamespace:
        assert pages == [TAGS]
        text = next(made)
        if text is None:
            raise ValueError("cut off")
        return SimpleNamespace(export_to_markdown=lambda: text)

    module = ModuleType("docling_core.types.doc.document")
    module.DocTagsDocument = SimpleNamespace(from_doctags_and_image_pairs=lambda tags, images: tags)  # type: ignore[attr-defined]
    module.DoclingDocument = SimpleNamespace(load_from_doctags=load)  # type: ignore[attr-defined]
    for name in ("docling_core", "docling_core.types", "docling_core.types.doc"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(doctags, "find_spec", lambda name: object())
    content = view(tmp_path, "md", [row(TAGS, count=1)] * 3)
    fenced = f"\n```\n{TAGS}\n```\n"
    assert content == "## a.pdf\n\n> ## Bill\n> \n> | A |\n> |---|\n" + fenced * 2


@pytest.mark.skipif(find_spec("docling_core") is None, reason="docling-core is not installed")
def test_doctags_become_markdown(tmp_path: Path) -> None:
    content = view(tmp_path, "md", [row(TAGS, count=1)])
    assert "Bill" in content and "|   A |   B |" in content and "<" not in content
