"""Character error rate of `vlm caption --preset text`, beside the one that the model's card states."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from vlm.bench.harness.bench_pages import encode
from vlm.bench.harness.results import result, say
from vlm.config import DEFAULT_MODEL
from vlm.train.drawing.documents import Document
from vlm.train.evaluate import edit_distance, held_out_documents

RESAMPLES = 2000
_CARD_ROW = re.compile(r"^\| (\w+) ?/ ?text \| [\d.]+ \| (\d+) \| [^|]* \| ([\d.]+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReadPage:
    """One page's answer: edits to the reference, characters of the reference."""

    edits: int
    length: int


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    value: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


def error_rate(pages: Sequence[ReadPage], seed: int = 0) -> Interval:
    """Edits per reference character, with the 95% interval of a bootstrap over pages."""

    def rate(chosen: Sequence[ReadPage]) -> float:
        return sum(page.edits for page in chosen) / sum(page.length for page in chosen)

    draw = Random(seed)
    rates = sorted(rate(draw.choices(pages, k=len(pages))) for _ in range(RESAMPLES))
    return Interval(rates[int(0.025 * RESAMPLES)], rate(pages), rates[int(0.975 * RESAMPLES) - 1])


def card_rates(card: str) -> dict[str, tuple[int, float]]:
    """By kind of document: (number of pages, character error rate) of the card's table."""
    return {kind: (int(count), float(rate)) for kind, count, rate in _CARD_ROW.findall(card)}


def card_interval(ours: Interval, num_ours: int, stated: tuple[int, float]) -> Interval:
    """The card states no interval: as wide as ours would be with its number of pages."""
    count, value = stated
    scale = (num_ours / count) ** 0.5
    return Interval(value - scale * (ours.value - ours.low), value, value + scale * (ours.high - ours.value))


def documents(count: int) -> list[Document]:
    """The first of the card's own held-out documents that have a text, kinds in turn."""
    kinds = ("sign", "label", "receipt", "invoice")
    found = [document for document in held_out_documents(5 * count // 4) if document.kind in kinds]
    return found[:count]


def whole_text(document: Document) -> str:
    return next(question.answer for question in document.questions if question.kind == "text")


def read_pages(
    root: Path, pages: Sequence[Document], options: Sequence[str] = ()
) -> dict[str, list[ReadPage]]:
    """By kind, what the command made of the pages. Raises RuntimeError."""
    folder, out = root / "reading", root / "reading.jsonl"
    folder.mkdir()
    for number, document in enumerate(pages):
        (folder / f"{number}.png").write_bytes(encode(document.image, "PNG"))
    command = [sys.executable, "-m", "vlm.cli.main", "caption", str(folder), "-o", str(out)]
    subprocess.run([*command, "--preset", "text", "--quiet", *options], check=True)
    rows = {Path(row["path"]).stem: row for row in map(json.loads, out.read_text().splitlines())}
    found: dict[str, list[ReadPage]] = {}
    for number, document in enumerate(pages):
        right = whole_text(document)
        edits = edit_distance(rows[str(number)]["text"], right)
        found.setdefault(document.kind, []).append(ReadPage(edits, len(right)))
    return found


def reading(root: Path, num_pages: int) -> dict[str, Any]:
    pages = documents(num_pages)
    say(f"{len(pages)} pages through vlm caption --preset text")
    by_kind = read_pages(root, pages)
    return compare(by_kind, card_rates((Path(DEFAULT_MODEL) / "README.md").read_text()))


def compare(
    by_kind: Mapping[str, Sequence[ReadPage]], stated: Mapping[str, tuple[int, float]]
) -> dict[str, Any]:
    """A figure per kind and one over all pages, where the card's kinds count as often as ours."""
    results = {}
    everything = [page for pages in by_kind.values() for page in pages]
    length = sum(page.length for page in everything)
    shares = {kind: sum(page.length for page in pages) / length for kind, pages in by_kind.items()}
    all_stated = (
        sum(stated[kind][0] for kind in by_kind),
        sum(stated[kind][1] * share for kind, share in shares.items()),
    )
    for kind, pages in [("all", everything), *by_kind.items()]:
        ours = error_rate(pages)
        card = card_interval(ours, len(pages), all_stated if kind == "all" else stated[kind])
        results["character_error_rate" if kind == "all" else f"character_error_rate_{kind}"] = result(
            ours.value,
            "of characters",
            model="vlm-default",
            pages=len(pages),
            interval=[round(ours.low, 4), round(ours.high, 4)],
            card=round(card.value, 4),
            card_interval=[round(max(0.0, card.low), 4), round(card.high, 4)],
            agrees_with_card=ours.overlaps(card),
        )
    return results
