"""What the default model answers through the service's own path, on documents that training never drew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from llm.request import SamplingParams
from vlm.bench.harness.bench_pages import encode
from vlm.bench.harness.results import report, result, say
from vlm.build import build_local_pipeline
from vlm.caption.presets import make_question
from vlm.cli.ask import answer, answer_messages
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.train.drawing.documents import Document, preset_questions
from vlm.train.evaluate import Report, evaluate, held_out_documents, share

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


def measure(options: EngineOptions, count: int, blank: bool = True) -> tuple[Report, dict[str, float]]:
    """Every question of `count` held-out documents, and of a blank page; exact match of the presets."""
    documents = list(held_out_documents(count))
    answerer = Answerer(options)
    try:
        found = evaluate(answerer, _told(documents), blank=blank)
        hits: dict[str, list[bool]] = {"fields": [], "summary": []}
        for document in documents:
            for question in preset_questions(document):
                hits[question.kind].append(answerer.preset(document.image, question.kind) == question.answer)
    finally:
        answerer.close()
    return found, {name: sum(right) / len(right) for name, right in hits.items() if right}


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


def run(quick: bool = False, model: str | Path = DEFAULT_MODEL) -> dict[str, Any]:
    """500 documents of the whole domain, 60 if `quick`; the table by kind goes to stderr."""
    found, presets = measure(EngineOptions(model=str(model)), 60 if quick else 500)
    say(found.table())
    for failure in found.failures[:12]:
        say(f"{failure.kind}: {failure.question!r} {failure.expected!r} was answered {failure.answered!r}")
    return report("accuracy", summarise(found, presets))
