"""`make demo`: a shipped image and one drawn at this moment, several questions each, cold and warm."""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llm.request import SamplingParams
from vlm.build import build_local_pipeline
from vlm.cli.ask import Reply, answer
from vlm.cli.errors import run
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.pipeline import Pipeline
from vlm.train.drawing.documents import compose_document

SAMPLES = Path(__file__).parent / "samples"
PARAMS = SamplingParams(max_tokens=96)


def shipped() -> tuple[Path, list[tuple[str, str]]]:
    """A sample image with questions and their true answers."""
    entry = json.loads((SAMPLES / "samples.json").read_text())[0]
    return SAMPLES / entry["file"], [(q, a) for q, a in entry["qa"]]


def drawn(seed: int) -> tuple[bytes, list[tuple[str, str]]]:
    """A document that didn't exist before, with its truth."""
    document = compose_document("receipt", seed, 1.0)
    buffer = io.BytesIO()
    document.image.save(buffer, "PNG")
    wanted = {q.kind: (q.text, q.answer) for q in document.questions if q.kind in ("total", "date")}
    return buffer.getvalue(), list(wanted.values())


async def interview(pipeline: Pipeline, data: bytes, truths: Sequence[tuple[str, str]]) -> list[Reply]:
    return [await answer(pipeline, [data], question, PARAMS) for question, _ in truths]


def is_right(given: str, truth: str) -> bool:
    """The bare answer, as the shipped model gives it, or a sentence that holds it."""
    return given == truth or f" {truth.casefold()}" in f" {given.casefold()}"


def show(title: str, answers: Sequence[Reply], truths: Sequence[tuple[str, str]]) -> int:
    """Prints answers beside the truth; returns how many are right."""
    print(f"\n{title}")
    right = 0
    for number, (given, (question, truth)) in enumerate(zip(answers, truths, strict=True), 1):
        correct = is_right(given.answer, truth)
        right += correct
        usage = given.usage
        print(f"  {number}. {question}")
        print(
            f"     {'right' if correct else 'WRONG'}: {given.answer!r}"
            + ("" if correct else f", not {truth!r}")
        )
        print(
            f"     first token after {given.timings.ttft_ms:.1f} ms; {usage.prompt_tokens} prompt tokens, "
            f"{usage.cached_tokens} from the cache"
        )
    return right


async def main(model: str) -> None:
    seed = secrets.randbelow(10**6) + 10**9
    pipeline = build_local_pipeline(EngineOptions(model=model))
    await pipeline.start()
    try:
        warm_up, warm_questions = drawn(seed + 1)
        await interview(pipeline, warm_up, warm_questions)  # first calls load and compile code; not timed
        path, truths = shipped()
        answers = await interview(pipeline, path.read_bytes(), truths)
        right = show(f"{path.name}, a shipped sample", answers, truths)
        fresh, fresh_truths = drawn(seed)
        fresh_answers = await interview(pipeline, fresh, fresh_truths)
        right += show(f"a receipt drawn just now from seed {seed}", fresh_answers, fresh_truths)
    finally:
        await pipeline.close()
    cold, warm = answers[0].timings.ttft_ms, answers[1].timings.ttft_ms
    print(f"\n{right} of {len(truths) + len(fresh_truths)} answers right")
    print(
        f"first question {cold:.1f} ms to the first token, second question {warm:.1f} ms: "
        f"{cold / warm:.1f} times as fast"
    )
    activate = "" if shutil.which("vlm") else f"source {os.path.relpath(sys.prefix)}/bin/activate, then "
    print(f"next: {activate}vlm ask IMAGE QUESTION, or vlm serve")


if __name__ == "__main__":
    run(lambda: asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL)))
