"""Accuracy of anything that answers questions about images, on held-out documents.

    report = evaluate(answer, held_out_documents(500))
    print(report.table())

`answer(image, question) -> str` may be the serving path, `transformers`, or `generate.answerer`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from PIL import Image

from vlm.train.drawing.documents import (
    HELD_OUT_SEED,
    KINDS,
    Document,
    Question,
    blank_image,
    compose_document,
)
from vlm.train.drawing.plausible import PLAUSIBLE_KINDS, plausible_document

Answer = Callable[[Image.Image, str], str]


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance in characters."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


@dataclass(frozen=True)
class Failure:
    """A wrong answer."""

    kind: str
    question: str
    expected: str
    answered: str


@dataclass
class Report:
    """Counts per "document kind/question kind": right and asked, on the documents and on blank pages instead.

    `edits` holds (edit distance, reference characters) of whole texts per document kind.
    """

    exact: dict[str, tuple[int, int]] = field(default_factory=dict)
    blank: dict[str, tuple[int, int]] = field(default_factory=dict)
    edits: dict[str, tuple[int, int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def accuracy(self, question_kind: str, kinds: Iterable[str] = tuple(KINDS)) -> float:
        """Exact match of one question kind over several document kinds; nan where none was asked."""
        return share(self.exact, question_kind, kinds)[0]

    def character_error_rate(self, kinds: Iterable[str] = tuple(KINDS)) -> float:
        """Edit distance over reference length, of whole texts; nan where none was asked."""
        pairs = [self.edits[kind] for kind in kinds if kind in self.edits]
        length = sum(pair[1] for pair in pairs)
        return sum(pair[0] for pair in pairs) / length if length else float("nan")

    def table(self) -> str:
        """A Markdown table: exact match, blank-page accuracy and character error rate."""
        rows = ["| document/question | exact | of | blank page | CER |", "|---|---|---|---|---|"]
        for name, (right, asked) in sorted(self.exact.items()):
            kind, question_kind = name.split("/")
            empty = "{}/{}".format(*self.blank[name]) if name in self.blank else ""
            rate = f"{self.character_error_rate([kind]):.3f}" if question_kind == "text" else ""
            rows.append(f"| {name} | {right / asked:.3f} | {asked} | {empty} | {rate} |")
        return "\n".join(rows)


def share(counts: dict[str, tuple[int, int]], question_kind: str, kinds: Iterable[str]) -> tuple[float, int]:
    """(share that is right, nan where none was asked; number asked) over kinds of documents."""
    pairs = [counts[name] for kind in kinds if (name := f"{kind}/{question_kind}") in counts]
    asked = sum(pair[1] for pair in pairs)
    return (sum(pair[0] for pair in pairs) / asked if asked else float("nan")), asked


def held_out_documents(
    count: int, level: float = 1.0, kinds: Iterable[str] = tuple(KINDS), first_seed: int = HELD_OUT_SEED
) -> Iterator[Document]:
    """`count` documents that training never draws, kinds in turn; three of four sellers are new."""
    names = list(kinds)
    for number in range(count):
        yield compose_document(names[number % len(names)], first_seed + number, level)


def plausible_documents(count: int, first_seed: int = HELD_OUT_SEED) -> Iterator[Document]:
    """`count` documents as a stranger may lay them out, kinds in turn, that training never draws: half of
    them in a font that it never draws, three of four sellers new."""
    names = list(PLAUSIBLE_KINDS)
    for number in range(count):
        yield plausible_document(names[number % len(names)], first_seed + number)


def _add(counts: dict[str, tuple[int, int]], name: str, right: int, asked: int = 1) -> None:
    before = counts.get(name, (0, 0))
    counts[name] = (before[0] + right, before[1] + asked)


def evaluate(
    answer: Answer,
    documents: Iterable[Document],
    wanted: Callable[[Question], bool] = lambda question: True,
    blank: bool = False,
) -> Report:
    """Asks every wanted question of every document, and with `blank` also of an empty page of its size."""
    report = Report()
    for document in documents:
        for question in filter(wanted, document.questions):
            name = f"{document.kind}/{question.kind}"
            answered = answer(document.image, question.text).strip()
            right = answered in (question.answer, *question.others)
            _add(report.exact, name, int(right))
            if question.kind == "text":
                _add(
                    report.edits,
                    document.kind,
                    edit_distance(answered, question.answer),
                    len(question.answer),
                )
            if not right:
                report.failures.append(Failure(name, question.text, question.answer, answered))
            if blank:
                _add(
                    report.blank,
                    name,
                    int(answer(blank_image(document), question.text).strip() == question.answer),
                )
    return report
