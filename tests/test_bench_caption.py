"""The caption benchmark's arithmetic, and its command line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vlm.bench import caption_bench as caption
from vlm.bench.captioning.caption_kills import Survival
from vlm.bench.captioning.caption_reading import (
    Interval,
    ReadPage,
    card_rates,
    compare,
    documents,
    error_rate,
    whole_text,
)
from vlm.cli.main import app
from vlm.config import DEFAULT_MODEL


def test_the_error_rate_weighs_pages_by_length_and_its_interval_holds_it() -> None:
    rate = error_rate([ReadPage(1, 10), ReadPage(0, 30), ReadPage(3, 10)] * 10)
    assert rate.value == 4 / 50 and rate.low < rate.value < rate.high
    assert error_rate([ReadPage(1, 10)] * 5) == Interval(0.1, 0.1, 0.1)


def test_more_pages_make_a_narrower_interval() -> None:
    pages = [ReadPage(number % 3, 10) for number in range(30)]
    few, many = error_rate(pages), error_rate(pages * 10)
    assert many.high - many.low < few.high - few.low


def test_the_card_states_a_rate_for_every_kind_that_is_read() -> None:
    stated = card_rates((Path(DEFAULT_MODEL) / "README.md").read_text())
    pages = documents(8)
    assert {page.kind for page in pages} <= stated.keys()
    assert all(count > 0 and 0 <= rate < 1 for count, rate in stated.values())
    assert all(whole_text(page) for page in pages)


@pytest.mark.parametrize(("edits", "agrees"), [(1, True), (9, False)])
def test_rates_agree_with_the_card_where_the_intervals_meet(edits: int, agrees: bool) -> None:
    pages = [ReadPage(edits * (number % 2), 10) for number in range(50)]
    results = compare({"sign": pages, "label": pages}, {"sign": (100, 0.05), "label": (100, 0.05)})
    assert set(results) == {f"character_error_rate{kind}" for kind in ("", "_sign", "_label")}
    assert all(entry["agrees_with_card"] is agrees for entry in results.values())


def test_work_done_twice_is_what_neither_an_answer_nor_a_kill_explains() -> None:
    rows: list[dict[str, Any]] = [
        {"path": "a", "page": 1, "text": "x"},
        {"path": "b", "page": 1, "text": "x", "duplicate_of": "a"},
        {"path": "c", "page": 1, "error": {}},
    ]
    made = Survival(rows)
    made.requests.update(["a", "a", "a"])
    made.under_way = [1]
    assert made.redone == 1 and made.num_pages == 3 and len(made.errors) == 1


def test_parts_run_alone_and_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption, "_part", lambda part, root, quick: {part: {"value": 1.0, "unit": "x"}})
    made = CliRunner().invoke(app, ["bench", "caption", "--part", "kills", "--part", "memory", "--json"])
    assert '"kills"' in made.stdout and '"memory"' in made.stdout and '"pages"' not in made.stdout
    wrong = CliRunner().invoke(app, ["bench", "caption", "--part", "sleep"])
    assert wrong.exception is not None and "sleep" in str(wrong.exception)
    monkeypatch.setattr(importlib.import_module("vlm.bench.plan_bench"), "run", lambda quick: {})
    assert "none" in str(CliRunner().invoke(app, ["bench", "plan", "--part", "kills"]).exception)
