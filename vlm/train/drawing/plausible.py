"""Receipts, invoices, labels and signs as a stranger may lay them out; what is asked may not be there."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from vlm.train.drawing import documents, wordings
from vlm.train.drawing.documents import HELD_OUT_SEED, Document, Question
from vlm.train.drawing.sheet import Row, Sheet, canvas_size, choose_look
from vlm.train.drawing.wordings import ABSENT

NUMBER = "What is the number of the invoice?"


@dataclass(frozen=True)
class Content:
    """Rows of a page and what can be asked of them."""

    rows: list[Row]
    questions: list[Question]
    centred_share: float = 0.2
    largest: int = 24  # px of the font at the model's scale


def plausible_document(kind: str, seed: int) -> Document:
    """Document number `seed` of a kind of PLAUSIBLE_KINDS: a pure function of these and of the installed
    fonts. From HELD_OUT_SEED on, half of them in a font that training never draws, three of four with a
    seller that training never shows."""
    if kind not in PLAUSIBLE_KINDS:
        raise ValueError(f"unknown kind of plausible document; known: {', '.join(PLAUSIBLE_KINDS)}")
    rng = Random(f"plausible/{kind}/{seed}")
    held_out = seed >= HELD_OUT_SEED
    unseen_font = held_out and rng.random() < 0.5
    while True:
        content = PLAUSIBLE_KINDS[kind](rng, held_out)
        look = choose_look(rng, unseen_font, content.centred_share)
        scale = rng.choice([1.0, 1.0, 1.25, 1.5, 2.0])
        sheet = Sheet(rng, canvas_size(rng), look, scale)
        if sheet.draw(content.rows, content.largest):
            break
    image, glyphs = sheet.finish()
    texts = [row.text() for row in content.rows]
    questions = (*content.questions, *documents.reading_questions(rng, texts))
    return Document(kind, image, questions, tuple(glyphs), tuple(texts))


def _absent(text: str) -> Question:
    return Question("absent", text, ABSENT)


def _receipt(rng: Random, held_out: bool) -> Content:
    seller = wordings.seller(rng, held_out and rng.random() < 0.75)
    day = wordings.date(rng)
    return _sale(rng, "receipt", seller, day, [])


def _invoice(rng: Random, held_out: bool) -> Content:
    seller = wordings.seller(rng, held_out and rng.random() < 0.75)
    number = str(rng.randint(100, 99999))
    word = rng.choice(["Invoice", "INVOICE", "Invoice no.", "Invoice #", "Invoice:"])
    together = Row(f"{word} {number}", bold=rng.random() < 0.3)
    head = together if rng.random() < 0.5 else Row(word, number)
    return _sale(rng, "invoice", seller, wordings.date(rng), [head], number)


def _sale(rng: Random, kind: str, seller: str, day: str, head: list[Row], number: str = "") -> Content:
    money = wordings.money_form(rng)
    count = rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5, rng.randint(4, 10)])
    goods: list[str] = []
    while len(goods) < count + 1:
        name = wordings.goods(rng)
        if all(name not in other and other not in name for other in goods):
            goods.append(name)
    missing = goods.pop()
    priced = rng.random() < 0.85
    prices = [money(wordings.cents(rng, 99), rng.random() < 0.3) if priced else "" for _ in goods]
    total = money(wordings.cents(rng, 999), True)
    absent = [_absent(f"What is the price of {missing}?")]
    top = [Row(seller, large=rng.choice([1.0, 1.0, 1.0, 1.25, 1.5]), bold=rng.random() < 0.35)]
    if rng.random() < 0.2:
        top.append(Row(wordings.address(rng)))
    dated = rng.random() < 0.92
    if dated:
        label = rng.choice(["", "", "", "Date", "Date:", "DATE", "Issued"])
        top.append(Row(label, day) if label and rng.random() < 0.6 else Row(f"{label} {day}".strip()))
    else:
        absent.append(_absent(rng.choice(documents.DATE)))
    top += head
    if rng.random() < 0.2:
        rng.shuffle(top)
    times = ["" if rng.random() < 0.9 else f"{rng.randint(1, 9)} x " for _ in goods]
    items = [Row(times[i] + name, prices[i], space=0.6 * (i == 0)) for i, name in enumerate(goods)]
    foot = [Row(*wordings.side_line(rng, money))] if rng.random() < 0.15 else []
    foot.append(_total_row(rng, total))
    after = [Row(wordings.thanks(rng))] if rng.random() < 0.15 else []
    rows = [*foot, *top, *items, *after] if rng.random() < 0.05 else [*top, *items, *foot, *after]
    questions = _asked(rng, kind, seller, day if dated else "", total)
    if priced:
        questions += [
            Question("price", f"What is the price of {name}?", price)
            for name, price in zip(goods, prices, strict=True)
        ]
    if number:
        questions.append(Question("number", NUMBER, number))
    else:
        absent.append(_absent(NUMBER))
    return Content(rows, [*questions, rng.choice(absent)])


def _total_row(rng: Random, total: str) -> Row:
    word = rng.choice(wordings.TOTAL_WORDS)
    space, ruled, bold = rng.choice([0.0, 0.4, 1.0]), rng.random() < 0.3, rng.random() < 0.35
    large = rng.choice([1.0, 1.0, 1.0, 1.25])
    return Row(word, total, large, bold, space, ruled)


def _asked(rng: Random, kind: str, seller: str, day: str, total: str) -> list[Question]:
    article = "An" if kind == "invoice" else "A"
    found = [
        Question("total", rng.choice(documents.TOTAL), total),
        Question("seller", rng.choice(documents.SELLER), seller),
        Question("caption", rng.choice(documents.DESCRIBE), f"{article} {kind} from {seller}."),
    ]
    return found + ([Question("date", rng.choice(documents.DATE), day)] if day else [])


def _label(rng: Random, held_out: bool) -> Content:
    lines = [wordings.line(rng, 20) for _ in range(rng.randint(1, 6))]
    headed = rng.random() < 0.35
    rows = [Row(text, large=1.3 if headed and i == 0 else 1.0) for i, text in enumerate(lines)]
    asked = rng.choice([rng.choice(documents.TOTAL), NUMBER, rng.choice(documents.SELLER)])
    return Content(rows, [_absent(asked)], 0.3, rng.choice([20, 24, 30]))


def _sign(rng: Random, held_out: bool) -> Content:
    letters = rng.randint(3, 12)
    lines = [wordings.line(rng, letters) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    rows = [Row(text, large=rng.choice([1.0, 1.0, 0.8]), bold=rng.random() < 0.3) for text in lines]
    absent = [_absent(rng.choice([*documents.TOTAL, NUMBER]))] if rng.random() < 0.3 else []
    return Content(rows, absent, 0.7, rng.randint(32, 72))


PLAUSIBLE_KINDS: dict[str, Callable[[Random, bool], Content]] = {
    "sign": _sign,
    "label": _label,
    "receipt": _receipt,
    "invoice": _invoice,
}
