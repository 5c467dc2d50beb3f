from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm.train.drawing.documents import HELD_OUT_SEED, compose_document
from vlm.train.evaluate import edit_distance, evaluate, held_out_documents

short = st.text("abc", max_size=6)


def reader(mistake: str = "") -> Callable[[Image.Image, str], str]:
    """Answers rightly from the generator's own answers, with `mistake` appended; nothing on other images."""
    known = {}
    for document in held_out_documents(10):
        for question in document.questions:
            known[document.image.tobytes(), question.text] = question.answer + mistake
    return lambda image, question: known.get((image.tobytes(), question), "")


@settings(max_examples=200, deadline=None)
@given(short, short, short)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_a_perfect_reader_scores_one_and_zero_on_blank_pages() -> None:
    report = evaluate(reader(), held_out_documents(10), blank=True)
    assert all(right == asked for right, asked in report.exact.values())
    assert all(right == 0 for right, _ in report.blank.values())
    assert report.character_error_rate() == 0.0
    assert report.accuracy("total", ["receipt", "invoice"]) == 1.0
    assert report.failures == []


def test_one_added_letter_fails_exact_match_but_not_the_character_error_rate() -> None:
    report = evaluate(reader("x"), held_out_documents(10), wanted=lambda question: question.kind == "text")
    assert all(right == 0 for right, _ in report.exact.values())
    characters = sum(length for _, length in report.edits.values())
    assert report.character_error_rate() == sum(edits for edits, _ in report.edits.values()) / characters
    assert 0 < report.character_error_rate() < 0.3
    assert {failure.answered for failure in report.failures} == {f.expected + "x" for f in report.failures}


def test_the_table_has_a_row_for_every_kind_of_question() -> None:
    report = evaluate(reader(), held_out_documents(5))
    table = report.table()
    assert all(f"| {name} |" in table for name in report.exact)


def test_held_out_documents_take_kinds_in_turn_from_held_out_seeds() -> None:
    documents = list(held_out_documents(4, kinds=["receipt", "sign"]))
    assert [document.kind for document in documents] == ["receipt", "sign", "receipt", "sign"]
    assert documents[0].lines == compose_document("receipt", HELD_OUT_SEED).lines
