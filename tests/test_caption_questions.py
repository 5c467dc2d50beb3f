"""What a caption run asks: presets, free prompts, schemas, and the order of text and image."""

from __future__ import annotations

from pathlib import Path

import pytest
from caption_fakes import FakeEngine, default_spec, png, rows_of, run

from vlm.caption.presets import PRESETS, PageQuestion, make_question, read_schema


def test_instruction_first_shares_the_text_prefix_over_all_pages(out: Path) -> None:
    """users.md C5: the ids before the first image are one common prefix, instruction included."""
    for number in range(3):
        Path(f"in/{number}.png").write_bytes(png(number))
    prompt = "Describe every detail of this document in the order of reading, please."
    prefixes = {}
    for order in ("instruction-first", "image-first"):
        engine = FakeEngine()
        out.unlink(missing_ok=True)
        run(out, engine=engine, question=make_question(prompt=prompt, order=order))  # type: ignore[arg-type]
        heads = {request.prompt.token_ids[: request.prompt.spans[0].start] for request in engine.submitted}
        assert len(heads) == 1
        prefixes[order] = len(heads.pop())
        assert all(request.priority == "batch" for request in engine.submitted)
    text_tokens = len(default_spec().tokenizer.encode(prompt))
    assert prefixes["instruction-first"] >= prefixes["image-first"] + text_tokens - 2


@pytest.mark.parametrize(
    ("question", "order"),
    [
        (
            make_question(prompt="Write down every line of this document in the order of reading."),
            "instruction-first",
        ),
        (make_question(preset="caption"), "image-first"),
        (make_question(preset="text"), "image-first"),
        (make_question(preset="caption", order="instruction-first"), "instruction-first"),
        (make_question(prompt="long " * 99, order="image-first"), "image-first"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.preset,
)
def test_the_instruction_comes_first_where_it_fills_a_block(question: PageQuestion, order: str) -> None:
    """users.md C5: a prefix that is shorter than a block of the cache can't be shared."""
    resolved = question.resolved(default_spec())
    assert resolved.order == order
    assert resolved.digest != question.digest or question.order != "auto"


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_asks_its_question(out: Path, preset: str) -> None:
    Path("in/a.png").write_bytes(png(1))
    engine = FakeEngine()
    question = make_question(preset=preset)
    run(out, engine=engine, question=question)
    (request,) = engine.submitted
    assert request.params.max_tokens == PRESETS[preset].max_tokens
    kind = "json_schema" if preset == "fields" else None
    assert (request.params.constraint[0] if request.params.constraint else None) == kind
    ids = default_spec().tokenizer.decode(list(request.prompt.token_ids))
    assert PRESETS[preset].prompt in ids
    assert rows_of(out)[0]["preset"] == preset


def test_questions_that_differ_in_anything_have_different_digests() -> None:
    schema = read_schema('{"type": "object"}')
    questions = [
        make_question(preset="caption"),
        make_question(preset="text"),
        make_question(prompt="Describe the image!"),
        make_question(preset="caption", max_tokens=5),
        make_question(preset="caption", order="image-first"),
        make_question(preset="caption", dpi=72),
        make_question(preset="caption", temperature=0.5),
        make_question(preset="caption", schema=schema),
        make_question(preset="caption", seed=3),
    ]
    assert len({question.digest for question in questions}) == len(questions)
    assert make_question().digest == make_question(preset="caption").digest
    assert make_question(prompt=PRESETS["caption"].prompt).digest == make_question(preset="caption").digest


@pytest.mark.parametrize(
    "wrong",
    [{"preset": "caption", "prompt": "x"}, {"preset": "nothing"}, {"prompt": "  "}],
    ids=str,
)
def test_wrong_questions_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make_question(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_wrong_schemas_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schema"):
        read_schema(text)
