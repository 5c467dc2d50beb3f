"""The accuracy benchmark's figures: counted over kinds of documents, and asked as captioning asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llm.request import SamplingParams
from vlm.bench.accuracy_bench import summarise
from vlm.build import build_local_pipeline
from vlm.caption.presets import PRESETS
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput
from vlm.train.drawing.documents import compose_document, preset_questions
from vlm.train.evaluate import Report


def test_shares_are_counted_over_receipts_and_invoices_together() -> None:
    found = Report(
        exact={"receipt/total": (3, 4), "invoice/total": (1, 1), "shapes/colour": (1, 2)},
        blank={"receipt/total": (1, 4), "invoice/total": (0, 1)},
        edits={"receipt": (1, 10), "sign": (9, 10)},
    )
    results = summarise(found, {"fields": 0.5})
    assert (results["total"]["value"], results["total"]["of"]) == (0.8, 5)
    assert results["total"]["blank_page"] == 0.2
    assert results["colour"]["value"] == 0.5
    assert results["cer_sales"]["value"] == 0.1 and results["cer_all"]["value"] == 0.5
    assert results["preset_fields"]["value"] == 0.5


@pytest.mark.parametrize("kind", ["receipt", "invoice"])
def test_presets_are_asked_in_the_words_the_model_was_taught(kind: str) -> None:
    questions = preset_questions(compose_document(kind, 5))
    assert {question.kind: question.text for question in questions} == {
        name: PRESETS[name].prompt for name in ("fields", "summary")
    }


def test_documents_without_a_seller_have_no_preset_questions() -> None:
    assert preset_questions(compose_document("label", 5)) == []


def test_the_default_model_answers_a_question_before_the_image_as_behind_it() -> None:
    """As OpenAI's documentation and many clients send it."""
    invoice = (Path(__file__).parent.parent / "vlm/samples/invoice.png").read_bytes()
    expected = {
        "What is the total?": "258.92",
        "What is the date?": "2027-04-23",
        "Who is the seller?": "Ze Deli",
    }

    async def ask() -> list[str]:
        pipeline = build_local_pipeline(EngineOptions(kv_cache_mb=64))
        await pipeline.start()
        try:
            answers = []
            for question in expected:
                for parts in ((question, ImageInput(invoice)), (ImageInput(invoice), question)):
                    message = ChatMessage("user", parts)
                    prepared = pipeline.prepare("r", [message], SamplingParams(max_tokens=20))
                    answers.append((await pipeline.answer(prepared)).choices[0].text)
            return answers
        finally:
            await pipeline.close()

    assert asyncio.run(ask()) == [answer for answer in expected.values() for _ in range(2)]
