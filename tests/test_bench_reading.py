"""The parts of the accuracy benchmark beside the narrow domain: pages laid out by hand, both orders."""

from PIL import Image

from vlm.bench.reading.hand import hand_documents
from vlm.bench.reading.orders import false_absences, summarise_orders
from vlm.train.drawing.documents import Document, Question
from vlm.train.drawing.wordings import ABSENT
from vlm.train.evaluate import Failure, Report, evaluate


def test_the_pages_laid_out_by_hand_are_at_least_thirty_of_three_kinds() -> None:
    documents = list(hand_documents())
    assert len(documents) >= 30
    assert {document.kind for document in documents} == {"receipt", "label", "sign"}
    assert all(document.image.mode == "RGB" for document in documents)
    assert sum(question.kind == "absent" for d in documents for question in d.questions) > 2


def test_what_is_asked_of_a_page_laid_out_by_hand_is_in_its_text_or_absent() -> None:
    for document in hand_documents():
        text = next(question.answer for question in document.questions if question.kind == "text")
        for question in document.questions:
            assert question.answer in text or (question.kind == "absent" and question.answer == ABSENT)
            assert all(other in question.answer for other in question.others)


def test_every_accepted_answer_is_right_and_no_other() -> None:
    page = Image.new("RGB", (8, 8))
    asked = Question("total", "What is the total?", "$1.50", ("1.50",))
    for answered, right in (("$1.50", 1), ("1.50", 1), ("1.5", 0)):
        report = evaluate(lambda image, question, told=answered: told, [Document("receipt", page, (asked,))])
        assert report.exact == {"receipt/total": (right, 1)}
        assert len(report.failures) == 1 - right


def test_a_false_absence_is_one_told_of_something_that_is_there() -> None:
    found = Report(
        exact={"receipt/total": (8, 10), "receipt/absent": (1, 3), "label/text": (9, 10)},
        failures=[
            Failure("receipt/total", "", "1.50", ABSENT),
            Failure("receipt/total", "", "1.50", "1.60"),
            Failure("receipt/absent", "", ABSENT, "7"),
        ],
    )
    assert false_absences(found) == 1 / 20


def test_both_orders_stand_beside_each_other() -> None:
    behind = Report(
        {"receipt/total": (3, 4), "sign/text": (1, 1)}, {"receipt/total": (1, 4)}, {"sign": (1, 10)}
    )
    before = Report({"receipt/total": (1, 4), "sign/text": (0, 1)}, {}, {"sign": (5, 10)})
    results = summarise_orders("hand", behind, before)
    total = results["hand_total"]
    assert (total["value"], total["of"], total["before"], total["blank_page"]) == (0.75, 4, 0.25, 0.25)
    assert results["hand_cer_all"]["value"] == 0.1 and results["hand_cer_sign"]["before"] == 0.5
