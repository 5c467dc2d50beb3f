"""What the default model answers through the service's own path, on documents that training never drew.

Parts: the narrow domain; plausible documents, asked in both orders of text and image; pages laid out by hand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from llm.request import SamplingParams
from vlm.bench import PARTS
from vlm.bench.harness.bench_pages import encode
from vlm.bench.harness.results import report, result, say
from vlm.bench.reading.hand import hand_documents
from vlm.bench.reading.orders import false_absences, summarise_orders
from vlm.build import build_local_pipeline
from vlm.caption.presets import make_question
from vlm.cli.ask import answer, answer_messages
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.pipeline import ChatMessage, ImageInput
from vlm.train.drawing.documents import Document, Question, preset_questions
from vlm.train.evaluate import Report, evaluate, held_out_documents, plausible_documents, share

SALES = ("receipt", "invoice")
PARAMS = SamplingParams(max_tokens=128)
PROGRESS_S = 5.0


class Answerer:
    """Asks as `vlm ask` and `vlm caption` do, one question after the other, greedily."""

    def __init__(self, options: EngineOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._pipeline = build_local_pipeline(options)
        self._loop.run_until_complete(self._pipeline.start())

    def __call__(self, image: Image.Image, question: str) -> str:
        told = answer(self._pipeline, [encode(image, "PNG")], question, PARAMS)
        return self._loop.run_until_complete(told).answer.strip()

    def before(self, image: Image.Image, question: str) -> str:
        """As a client asks that writes the question before the image."""
        message = ChatMessage("user", (question, ImageInput(encode(image, "PNG"))))
        told = answer_messages(self._pipeline, question, [message], PARAMS)
        return self._loop.run_until_complete(told).answer.strip()

    def preset(self, image: Image.Image, name: str) -> str:
        """What captioning's preset `name` makes of the page."""
        question = make_question(preset=name).resolved(self._pipeline.spec)
        told = answer_messages(
            self._pipeline, question.prompt, question.messages(encode(image, "PNG")), question.params
        )
        return self._loop.run_until_complete(told).answer.strip()

    def close(self) -> None:
        self._loop.run_until_complete(self._pipeline.close())
        self._loop.close()


def _told(documents: Sequence[Document]) -> Iterator[Document]:
    """The documents, with a line of progress now and then."""
    started = spoken = time.monotonic()
    for number, document in enumerate(documents):
        now = time.monotonic()
        if now - spoken > PROGRESS_S:
            say(f"accuracy: {number} of {len(documents)} documents, {now - started:.0f} s")
            spoken = now
        yield document


def measure(answerer: Answerer, count: int, blank: bool = True) -> tuple[Report, dict[str, float]]:
    """Every question of `count` held-out documents, and of a blank page; exact match of the presets."""
    documents = list(held_out_documents(count))
    found = evaluate(answerer, _told(documents), blank=blank)
    hits: dict[str, list[bool]] = {"fields": [], "summary": []}
    for document in documents:
        for question in preset_questions(document):
            hits[question.kind].append(answerer.preset(document.image, question.kind) == question.answer)
    return found, {name: sum(right) / len(right) for name, right in hits.items() if right}


def both_orders(answerer: Answerer, name: str, documents: Sequence[Document]) -> dict[str, dict[str, Any]]:
    """Figures of part `name`: all questions but those about a line, behind the image and before it."""

    def wanted(question: Question) -> bool:
        return question.kind != "line"

    behind = evaluate(answerer, _told(documents), wanted, blank=True)
    before = evaluate(answerer.before, _told(documents), wanted)
    _show(behind)
    return summarise_orders(name, behind, before) | {
        f"{name}_false_absent": result(
            false_absences(behind), "answers", before=round(false_absences(before), 4)
        )
    }


def summarise(found: Report, presets: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The figures a model card states first."""
    results = {}
    for kind, documents in (
        *((kind, SALES) for kind in ("total", "date", "seller", "price", "number")),
        *((kind, ("shapes",)) for kind in ("colour", "shape", "count", "caption")),
    ):
        value, asked = share(found.exact, kind, documents)
        blank, _ = share(found.blank, kind, documents)
        results[kind] = result(value, "exact", of=asked, blank_page=round(blank, 4))
    for name, kinds in (("sales", SALES), ("sign", ("sign",)), ("label", ("label",)), ("all", ())):
        rate = found.character_error_rate(kinds) if kinds else found.character_error_rate()
        results[f"cer_{name}"] = result(rate, "edits/char")
    return results | {f"preset_{name}": result(value, "exact") for name, value in presets.items()}


def _show(found: Report) -> None:
    say(found.table())
    for failure in found.failures[:12]:
        say(f"{failure.kind}: {failure.question!r} {failure.expected!r} was answered {failure.answered!r}")


def run(
    quick: bool = False, model: str | Path = DEFAULT_MODEL, parts: Sequence[str] = PARTS["accuracy"]
) -> dict[str, Any]:
    """500 documents of the domain and 500 plausible ones, 60 each if `quick`; tables by kind go to stderr."""
    count = 60 if quick else 500
    results: dict[str, dict[str, Any]] = {}
    answerer = Answerer(EngineOptions(model=str(model)))
    try:
        if "domain" in parts:
            found, presets = measure(answerer, count)
            _show(found)
            results |= summarise(found, presets)
        if "plausible" in parts:
            results |= both_orders(answerer, "plausible", list(plausible_documents(count)))
        if "hand" in parts:
            results |= both_orders(answerer, "hand", list(hand_documents()))
    finally:
        answerer.close()
    return report("accuracy", results)
