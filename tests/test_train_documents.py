import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm.train.drawing import words
from vlm.train.drawing.documents import HELD_OUT_SEED, KINDS, blank_image, compose_document, make_document

seeds = st.integers(0, 2 * HELD_OUT_SEED)
levels = st.sampled_from([0.0, 0.3, 0.7, 1.0])
kinds = st.sampled_from(sorted(KINDS))


@settings(max_examples=40, deadline=None)
@given(kinds, seeds, levels)
def test_a_document_depends_on_its_arguments_alone(kind: str, seed: int, level: float) -> None:
    first, second = make_document(kind, seed, level), make_document(kind, seed, level)
    assert np.array_equal(np.asarray(first[0]), np.asarray(second[0]))
    assert first[1] == second[1]


def test_seeds_give_different_documents() -> None:
    for kind in KINDS:
        images = {compose_document(kind, seed).image.tobytes() for seed in range(20)}
        assert len(images) == 20


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["sign", "label", "receipt", "invoice"]), seeds, levels)
def test_every_visible_character_lies_on_the_page_in_reading_order(
    kind: str, seed: int, level: float
) -> None:
    document = compose_document(kind, seed, level)
    scale = 256 / max(document.image.size)
    width, height = (side * scale for side in document.image.size)
    assert all(0 <= glyph.x < width and 0 <= glyph.y < height for glyph in document.glyphs)
    assert "".join(glyph.char for glyph in document.glyphs) == "".join(document.lines).replace(" ", "")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["sign", "label", "receipt", "invoice"]), seeds, levels)
def test_ink_is_where_the_glyphs_are(kind: str, seed: int, level: float) -> None:
    document = compose_document(kind, seed, level)
    scale = max(document.image.size) / 256
    pixels = np.asarray(document.image.convert("L"), dtype=int)
    paper = int(np.bincount(pixels.ravel()).argmax())
    for glyph in document.glyphs:
        reach = glyph.size * scale * 0.6
        x, y = glyph.x * scale, glyph.y * scale
        box = pixels[max(0, int(y - reach)) : int(y + reach) + 1, max(0, int(x - reach)) : int(x + reach) + 1]
        assert (paper - box).max() > 80


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["receipt", "invoice"]), seeds, levels)
def test_answers_about_a_sale_are_written_on_it(kind: str, seed: int, level: float) -> None:
    document = compose_document(kind, seed, level)
    text = "\n".join(document.lines)
    assert len(document.lines) <= 6
    answers = {question.kind: question.answer for question in document.questions}
    assert answers["text"] == text
    for name in ("total", "date", "seller"):
        assert answers[name] in text
    assert answers["total"] in document.lines[-1]


def test_prices_are_asked_of_goods_on_the_page() -> None:
    asked = 0
    for seed in range(40):
        document = compose_document("receipt", seed)
        for question in document.questions:
            if question.kind == "price":
                name = question.text.removeprefix("What is the price of ").removesuffix("?")
                assert f"{name} {question.answer}" in document.lines
                asked += 1
    assert asked > 20


def test_training_never_names_a_held_out_seller_and_most_held_out_documents_do() -> None:
    def seller(seed: int) -> str:
        questions = compose_document("receipt", seed).questions
        return next(question.answer for question in questions if question.kind == "seller")

    assert not any(words.is_held_out(seller(seed)) for seed in range(100))
    unseen = sum(words.is_held_out(seller(HELD_OUT_SEED + seed)) for seed in range(100))
    assert unseen >= 60


def test_shape_answers_agree_with_the_caption() -> None:
    for seed in range(60):
        document = compose_document("shapes", seed)
        caption = next(question.answer for question in document.questions if question.kind == "caption")
        count = next(question.answer for question in document.questions if question.kind == "count")
        named = caption.removesuffix(".").lower().replace(" and ", ", ").split(", ")
        assert len(named) == int(count)
        for question in document.questions:
            if question.kind == "colour":
                form = question.text.removesuffix("?").split()[-1]
                assert any(name.endswith(f" {question.answer} {form}") for name in named)


def test_the_easiest_level_is_easier() -> None:
    for kind in ("label", "receipt", "invoice", "sign"):
        short = sum(len("".join(compose_document(kind, seed, 0.0).lines)) for seed in range(40))
        full = sum(len("".join(compose_document(kind, seed, 1.0).lines)) for seed in range(40))
        assert short < full


def test_unknown_kind_and_level_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        make_document("poem", 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        make_document("receipt", 1, 1.5)


def test_a_blank_page_keeps_the_size_and_shows_nothing() -> None:
    document = compose_document("invoice", 3)
    blank = blank_image(document)
    assert isinstance(blank, Image.Image)
    assert blank.size == document.image.size
    assert np.asarray(blank).min() == 255
