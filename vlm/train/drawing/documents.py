"""Rendered documents with their questions and answers: training data, tests, demonstrations and benchmarks.

`make_document` is a pure function of its arguments. Coordinates are in px at the model's scale, where the
longest edge of a page is 256; an image may be drawn at a multiple of it, which the preprocessor undoes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from PIL import Image

from vlm.train.drawing import layout, shapes, words
from vlm.train.drawing.layout import Glyph, Page

HELD_OUT_SEED = 10**9
"""Training draws seeds below it. From it on, three of four documents name a seller training never shows."""


@dataclass(frozen=True)
class Question:
    """One question, its exact answer, and the kind it is counted under; `others` are right as well."""

    kind: str
    text: str
    answer: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """An image with all its questions; `glyphs` and `spots` say what stands where (model scale)."""

    kind: str
    image: Image.Image
    questions: tuple[Question, ...]
    glyphs: tuple[Glyph, ...] = ()
    lines: tuple[str, ...] = ()
    spots: tuple[shapes.Spot, ...] = ()


@dataclass
class Draft:
    """Lines of a page in reading order: (left part, right-aligned part or "")."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def texts(self) -> list[str]:
        """What a reader writes down, line by line."""
        return [f"{left} {right}".strip() for left, right in self.lines]


WHOLE_TEXT = ("Read the text.", "What does it say?", "Transcribe the text.")
DESCRIBE = ("Describe the image.", "What is in the image?")
TOTAL = ("What is the total?", "How much is the total?", "What is the total amount?")
DATE = ("What is the date?", "What is the date of the document?")
SELLER = ("Who is the seller?", "What is the name of the seller?", "Which company is it from?")


FIELDS = "Give the fields of the document as JSON."
SUMMARY = "Summarize the document in one or two sentences."


def preset_questions(document: "Document") -> list[Question]:
    """What captioning's presets `fields` and `summary` ask of a receipt or invoice; none for other kinds."""
    known = {question.kind: question.answer for question in document.questions}
    if not {"seller", "date", "total"} <= known.keys():
        return []
    values = {"kind": document.kind} | {name: known[name] for name in ("seller", "date", "total")}
    fields = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    article = "An" if document.kind == "invoice" else "A"
    summary = (
        f"{article} {document.kind} from {known['seller']} of {known['date']}. The total is {known['total']}."
    )
    return [Question("fields", FIELDS, fields), Question("summary", SUMMARY, summary)]


def reading_questions(rng: Random, texts: list[str]) -> list[Question]:
    """Whole text and every line."""
    found = [Question("text", rng.choice(WHOLE_TEXT), "\n".join(texts))]
    found += [Question("line", f"Read line {number}.", text) for number, text in enumerate(texts, 1)]
    return found


def _items(rng: Random, count: int, letters: int, units: int) -> list[tuple[str, str]]:
    names: list[str] = []
    while len(names) < count:
        name = words.goods(rng, letters)
        if name not in names:
            names.append(name)
    return [(name, words.amount(rng, units)) for name in names]


def _sale(
    rng: Random, kind: str, seller: str, day: str, items: list[tuple[str, str]], total: str
) -> list[Question]:
    found = [
        Question("total", rng.choice(TOTAL), total),
        Question("date", rng.choice(DATE), day),
        Question("seller", rng.choice(SELLER), seller),
        Question(
            "caption", rng.choice(DESCRIBE), f"{'An' if kind == 'invoice' else 'A'} {kind} from {seller}."
        ),
    ]
    found += [Question("price", f"What is the price of {name}?", price) for name, price in items]
    return found


def _held_out(rng: Random, seed: int) -> bool:
    return seed >= HELD_OUT_SEED and rng.random() < 0.75


def receipt(rng: Random, seed: int, level: float) -> Document:
    """Seller, date, up to three items and a total, on a narrow (128x256) or square (256x256) page."""
    width = 128 if rng.random() < 0.6 else 256
    narrow = width == 128
    seller = words.seller_name(rng, 10 if narrow else 15, _held_out(rng, seed))
    day = words.date(rng, dotted=rng.random() < 0.3)
    items = _items(rng, rng.randint(0, round(3 * level)), 5 if narrow else 9, 99)
    sign = "$" if not narrow and rng.random() < 0.3 else ""
    total = sign + words.amount(rng, 999)
    draft = Draft([(seller, ""), (day, ""), *items, (rng.choice(["Total", "TOTAL", "Sum"]), total)])
    if rng.random() < 0.2:
        draft.lines[0], draft.lines[1] = draft.lines[1], draft.lines[0]
    questions = _sale(rng, "receipt", seller, day, items, total)
    return _compose(rng, "receipt", Page(width, 256), draft, level, questions)


def invoice(rng: Random, seed: int, level: float) -> Document:
    """A numbered invoice of four to six lines on a square page, or of four on a wide one (256x128)."""
    wide = rng.random() < 0.4
    seller = words.seller_name(rng, 15, _held_out(rng, seed))
    day = words.date(rng, dotted=rng.random() < 0.3)
    number = str(rng.randint(100, 99999))
    items = [] if wide else _items(rng, rng.randint(0, round(2 * level)), 9, 999)
    total = rng.choice(["", "$"]) + words.amount(rng, 999)
    head = [("Invoice", number)] if rng.random() < 0.5 else [(f"Invoice {number}", "")]
    draft = Draft(
        [*head, (seller, ""), ("Date", day), *items, (rng.choice(["Total", "TOTAL", "Amount due"]), total)]
    )
    questions = _sale(rng, "invoice", seller, day, items, total)
    questions.append(Question("number", "What is the number of the invoice?", number))
    return _compose(rng, "invoice", Page(256, 128 if wide else 256), draft, level, questions)


def label(rng: Random, seed: int, level: float) -> Document:
    """One to four lines of free text at the size of receipts, on any of the three page shapes."""
    width, height = rng.choice([(128, 256), (256, 128), (256, 256)])
    letters = 10 if width == 128 else 16
    count = rng.randint(1, 1 + round(3 * level))
    draft = Draft(
        [(words.free_line(rng, max(4, round(letters * (0.3 + 0.7 * level)))), "") for _ in range(count)]
    )
    return _compose(rng, "label", Page(width, height), draft, level, [])


def _compose(
    rng: Random,
    kind: str,
    page: Page,
    draft: Draft,
    level: float,
    questions: list[Question],
) -> Document:
    image, glyphs = layout.draw_lines(rng, page, draft.lines, level)
    texts = draft.texts()
    return Document(kind, image, (*questions, *reading_questions(rng, texts)), tuple(glyphs), tuple(texts))


def sign(rng: Random, seed: int, level: float) -> Document:
    """One to three lines of up to nine large characters (16 to 34 px in the thumbnail), square page."""
    letters = 2 + round(7 * level)
    texts = [words.free_line(rng, letters) for _ in range(rng.randint(1, 1 + round(2 * level)))]
    image, glyphs = layout.draw_sign(rng, texts)
    return Document("sign", image, tuple(reading_questions(rng, texts)), tuple(glyphs), tuple(texts))


def shape_picture(rng: Random, seed: int, level: float) -> Document:
    """Up to three coloured shapes on a square page, with captions, counts, colours and shapes by colour."""
    drawn = shapes.choose(rng, rng.randint(1, 1 + round(2 * level)))
    questions = tuple(Question(kind, text, answer) for kind, text, answer in shapes.questions(rng, drawn))
    image, spots = shapes.draw(rng, drawn)
    return Document("shapes", image, questions, spots=tuple(spots))


KINDS: dict[str, Callable[[Random, int, float], Document]] = {
    "shapes": shape_picture,
    "sign": sign,
    "label": label,
    "receipt": receipt,
    "invoice": invoice,
}


def compose_document(kind: str, seed: int, level: float = 1.0) -> Document:
    """Document number `seed` of a kind of KINDS; `level` from 0 (easiest) to 1 (the whole domain)."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of document; known: {', '.join(KINDS)}")
    if not 0.0 <= level <= 1.0:
        raise ValueError("level must lie between 0 and 1")
    return KINDS[kind](Random(f"{kind}/{seed}/{level:.3f}"), seed, level)


def make_document(kind: str, seed: int, level: float = 1.0) -> tuple[Image.Image, list[tuple[str, str]]]:
    """The image of `compose_document` and its (question, answer) pairs."""
    document = compose_document(kind, seed, level)
    return document.image, [(question.text, question.answer) for question in document.questions]


def blank_image(document: Document) -> Image.Image:
    """A white image of the document's size: what a model answers from it is its prior."""
    return Image.new("RGB", document.image.size, (255, 255, 255))
