"""Documents as a stranger lays them out: what they show, what is asked of them, what training holds back."""

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.train.batches import draw
from vlm.train.drawing import fonts, sheet, wordings, words
from vlm.train.drawing.documents import HELD_OUT_SEED, KINDS, preset_questions
from vlm.train.drawing.plausible import PLAUSIBLE_KINDS, plausible_document
from vlm.train.drawing.sheet import Look, Row, Sheet
from vlm.train.drawing.tiles import CLASS_OF, RULE, TILE, cut, patch_targets
from vlm.train.drawing.wordings import ABSENT

kinds = st.sampled_from(sorted(PLAUSIBLE_KINDS))
seeds = st.integers(0, HELD_OUT_SEED - 1)
LOOK = Look("dejavu-sans", bold=False, flush=False, gap="  ", leader="", centred=False)


@settings(max_examples=25, deadline=None)
@given(kinds, seeds)
def test_a_document_depends_on_its_arguments_alone(kind: str, seed: int) -> None:
    first, second = plausible_document(kind, seed), plausible_document(kind, seed)
    assert first.image.tobytes() == second.image.tobytes()
    assert first.questions == second.questions and first.glyphs == second.glyphs


@settings(max_examples=60, deadline=None)
@given(kinds, seeds)
def test_every_character_lies_in_a_tile_in_reading_order(kind: str, seed: int) -> None:
    document = plausible_document(kind, seed)
    grid = RULE.plan(*document.image.size).grid
    assert all(0 <= g.x < grid.cols * TILE and 0 <= g.y < grid.rows * TILE for g in document.glyphs)
    assert "".join(g.char for g in document.glyphs) == "".join(document.lines).replace(" ", "")
    assert min(g.size for g in document.glyphs) >= 0.75 * sheet.SMALLEST


@settings(max_examples=60, deadline=None)
@given(kinds, seeds)
def test_answers_are_written_on_the_page_and_absent_things_are_not(kind: str, seed: int) -> None:
    document = plausible_document(kind, seed)
    text = "\n".join(document.lines)
    for question in document.questions:
        if question.kind in ("total", "seller", "date", "price", "number", "line", "text"):
            assert question.answer in text
        if question.kind == "absent":
            assert question.answer == ABSENT
            if question.text.startswith("What is the price of "):
                assert question.text[21:-1] not in text
    answered = {question.text for question in document.questions if question.kind != "absent"}
    assert answered.isdisjoint(q.text for q in document.questions if q.kind == "absent")


def test_ink_is_where_the_glyphs_are_though_the_page_is_turned_and_stretched() -> None:
    checked = 0
    for seed in range(12):
        document = plausible_document("receipt", seed)
        pieces = cut(document.image)
        rows, cols = pieces.grid.rows, pieces.grid.cols
        whole = pieces.pixels[: rows * cols].reshape(rows, cols, TILE, TILE, 3).transpose(0, 2, 1, 3, 4)
        grey = whole.reshape(rows * TILE, cols * TILE, 3).mean(-1)
        paper = np.median(grey)
        for glyph in document.glyphs:
            if glyph.char in ".,:-":
                continue
            x, y, reach = round(glyph.x), round(glyph.y), max(round(0.25 * glyph.size), 3)
            box = grey[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
            assert np.abs(box - paper).max() > 40, (seed, glyph)
            checked += 1
    assert checked > 300


def test_documents_differ_in_ratio_font_size_and_paper() -> None:
    documents = [plausible_document("receipt", seed) for seed in range(60)]
    ratios = {round(d.image.width / d.image.height, 1) for d in documents}
    assert len(ratios) > 8
    assert len({round(d.glyphs[0].size) for d in documents}) > 6
    papers = [np.median(np.asarray(d.image.convert("L"))) for d in documents]
    assert sum(shade < 120 for shade in papers) > 3 and sum(shade > 200 for shade in papers) > 30


def test_money_dates_and_totals_come_in_the_forms_people_write() -> None:
    rng = Random(0)
    written = {wordings.money_form(rng)(123456, True) for _ in range(300)}
    assert {"1,234.56", "1234.56", "$1,234.56", "$1234.56", "EUR 1,234.56", "1,234.56 USD"} <= written
    dates = [wordings.date(rng) for _ in range(800)]
    forms = {re.sub(r"[A-Za-z]", "a", re.sub(r"\d", "9", day)) for day in dates}
    assert {"9999-99-99", "99.99.9999", "99/99/9999", "99-99-9999", "99 aaa 9999", "aaa 99, 9999"} <= forms
    totals = {plausible_document("receipt", seed).lines[-1].split(" ")[0] for seed in range(80)}
    assert len(totals & {"Total", "TOTAL", "TOTAL:", "Sum", "Amount", "To", "Balance", "Grand"}) > 4


def test_dates_stand_without_a_label_and_items_without_a_price() -> None:
    documents = [plausible_document("receipt", seed) for seed in range(60)]
    days = [next((q.answer for q in d.questions if q.kind == "date"), "") for d in documents]
    assert sum(day in d.lines for day, d in zip(days, documents, strict=True)) > 15
    assert sum(day == "" for day in days) > 0
    assert sum(not any(q.kind == "price" for q in d.questions) for d in documents) > 5


def test_training_never_draws_the_held_out_families_and_sellers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def families(held_out: bool) -> tuple[str, ...]:
        asked.append(held_out)
        return ("dejavu-sans",)

    monkeypatch.setattr(sheet, "plausible_families", families)
    for index in range(40):
        document, _ = draw(index, 0, {"receipt": 1.0}, dict.fromkeys(KINDS, 1.0))
        seller = next(q.answer for q in document.questions if q.kind == "seller")
        assert not words.is_held_out(seller)
    assert asked and not any(asked)
    asked.clear()
    for seed in range(HELD_OUT_SEED, HELD_OUT_SEED + 40):
        plausible_document("label", seed)
    assert sum(asked) > 8 and not all(asked)
    assert fonts.PLAUSIBLE.keys().isdisjoint(fonts.HELD_OUT)


def test_rows_that_do_not_fit_are_refused_rather_than_cut_off() -> None:
    assert not Sheet(Random(0), (128, 256), LOOK, 1.0).draw([Row("W" * 40)], 24)
    assert not Sheet(Random(0), (256, 100), LOOK, 1.0).draw([Row("A")] * 20, 24)
    assert Sheet(Random(0), (256, 100), LOOK, 1.0).draw([Row("A", "9.99")], 24)


def test_a_sign_of_a_currency_outside_ascii_takes_no_character_loss() -> None:
    document = next(
        d for seed in range(300) if "€" in "".join((d := plausible_document("receipt", seed)).lines)
    )
    targets = patch_targets(document.glyphs, (), cut(document.image).grid)
    assert targets.max() <= max(CLASS_OF.values())


def test_presets_ask_only_for_fields_that_are_all_there() -> None:
    for seed in range(60):
        document = plausible_document("receipt", seed)
        dated = any(question.kind == "date" for question in document.questions)
        assert bool(preset_questions(document)) == dated


def test_a_missing_family_is_told_with_the_packages_that_hold_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fonts.plausible_families.cache_clear()
    monkeypatch.setattr(fonts, "_installed", dict)
    with pytest.raises(FileNotFoundError, match="fonts-lato"):
        fonts.plausible_families(True)
    fonts.plausible_families.cache_clear()


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="receipt"):
        plausible_document("poem", 1)


def test_images_are_in_colour_whatever_became_of_them() -> None:
    documents = [plausible_document(kind, seed) for kind in PLAUSIBLE_KINDS for seed in range(12)]
    assert {document.image.mode for document in documents} == {"RGB"}


def test_a_turned_and_stretched_letter_is_marked_where_it_lies() -> None:
    for seed in range(40):
        page = Sheet(Random(seed), (256, 180), LOOK, 1.0)
        page.paper, page.ink = (255, 255, 255), (0, 0, 0)
        page.pen.rectangle((0, 0, 256, 180), page.paper)
        page.write("H", 12, 20, False, 24)
        image, (glyph,) = page.finish()
        pixels = 255.0 - np.asarray(image.convert("L").resize((256, 256)))[12:60, 8:60]
        ink = np.where(pixels > 100, pixels, 0)
        rows, cols = np.indices(ink.shape)
        assert abs((ink * rows).sum() / ink.sum() + 12 - glyph.y) < 2
        assert abs((ink * cols).sum() / ink.sum() + 8 - glyph.x) < 2
