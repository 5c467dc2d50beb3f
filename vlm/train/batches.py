"""Documents drawn by number, and turned into flat training batches."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from vlm.train.decoder import segment_mask
from vlm.train.drawing.documents import (
    KINDS,
    Document,
    Question,
    compose_document,
    preset_questions,
)
from vlm.train.drawing.plausible import PLAUSIBLE_KINDS, plausible_document
from vlm.train.drawing.tiles import cut, patch_targets
from vlm.train.prompts import PromptBuilder, Sequence

PRESET_SHARE = 0.12
FIRST_SHARE = 0.45
TURNS_SHARE = 0.2  # of the documents that are asked nothing before the image
TURNS = 3
PLAUSIBLE_SHARE = 0.65  # of all kinds but shapes; the rest keeps to the narrow domain
QUESTION_TOKENS = 150  # a document's questions and answers are cut to about this many tokens


@dataclass(frozen=True)
class Batch:
    """Distinct tiles (U, 128, 128, 3) uint8 with character targets (U, 64, 2); `uses` (T,) names each tile's.

    Sequences are flat (N,), with one mask each.
    `answers` names the kind of each answer and its interval [start, stop) among the wanted positions.
    """

    tiles: Tensor
    characters: Tensor
    uses: Tensor
    tokens: Tensor
    positions: Tensor
    targets: Tensor
    lengths: list[int]
    masks: list[Tensor]
    answers: list[tuple[str, int, int]]


@dataclass(frozen=True)
class QuestionSet:
    """What is asked of one image; `first`: the only question, written before the image; `turns`: one question
    after the answer to the other."""

    questions: list[Question]
    first: bool = False
    turns: bool = False


def choose_questions(rng: Random, document: Document, builder: PromptBuilder) -> QuestionSet:
    """Questions in random order up to the token limit, two of them about lines; the whole text comes first
    two times out of three.

    Clients write text and image in either order: FIRST_SHARE of the documents are asked one question, before
    the image; some are asked up to TURNS questions, one after the other's answer. One in eight that
    captioning's presets fit is asked one of these alone, in either order.
    """
    presets = preset_questions(document)
    if presets and rng.random() < PRESET_SHARE:
        return QuestionSet([rng.choice(presets)], rng.random() < 0.5)
    if rng.random() < FIRST_SHARE:
        kinds = sorted({question.kind for question in document.questions})
        kind = rng.choice(kinds)
        return QuestionSet([rng.choice([q for q in document.questions if q.kind == kind])], True)
    questions = list(document.questions)
    rng.shuffle(questions)
    if rng.random() < TURNS_SHARE:
        return QuestionSet([q for q in questions if q.kind != "text"][:TURNS] or questions[:1], turns=True)
    lines = [question for question in questions if question.kind == "line"][2:]
    questions = [question for question in questions if question not in lines]
    if rng.random() < 0.67:
        questions.sort(key=lambda q: q.kind != "text")
    chosen: list[Question] = []
    room = QUESTION_TOKENS
    for question in questions:
        asked, answered = builder.segment(question.text, question.answer)
        room -= len(asked) + len(answered)
        if chosen and room < 0:
            break
        chosen.append(question)
    return QuestionSet(chosen)


def collate(items: list[tuple[Document, QuestionSet]], builder: PromptBuilder) -> Batch:
    """Documents with the questions to ask of each."""
    sequences, answers = [], []
    tiles: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    uses: list[int] = []
    seen: dict[bytes, int] = {}
    wanted = 0
    for document, asked in items:
        pieces = cut(document.image)
        marks = patch_targets(document.glyphs, document.spots, pieces.grid)
        for tile, targets in zip(pieces.pixels, marks, strict=True):
            number = seen.setdefault(tile.tobytes(), len(tiles))
            if number == len(tiles):
                tiles.append(tile)
                characters.append(targets)
            uses.append(number)
        sequence: Sequence = builder.sequence(
            pieces.grid,
            [(q.text, q.answer) for q in asked.questions],
            asked.first,
            asked.turns,
        )
        sequences.append(sequence)
        for question in asked.questions:
            count = len(builder.segment(question.text, question.answer)[1])
            name = f"{document.kind}/{question.kind}{'-first' if asked.first else ''}"
            answers.append((name, wanted, wanted + count))
            wanted += count
    return Batch(
        torch.from_numpy(np.stack(tiles)),
        torch.from_numpy(np.stack(characters)),
        torch.tensor(uses),
        torch.from_numpy(np.concatenate([s.tokens for s in sequences])),
        torch.from_numpy(np.concatenate([s.positions for s in sequences])),
        torch.from_numpy(np.concatenate([s.targets for s in sequences])),
        [len(s.tokens) for s in sequences],
        [segment_mask(torch.from_numpy(s.segments)) for s in sequences],
        answers,
    )


def draw(
    index: int, run_seed: int, mix: dict[str, float], levels: dict[str, float]
) -> tuple[Document, Random]:
    """Training document number `index`: PLAUSIBLE_SHARE as a stranger may lay it out; of the others three of
    ten come from an easier level than the current one."""
    rng = Random(f"train/{run_seed}/{index}")
    kind = rng.choices(list(mix), list(mix.values()))[0]
    level = levels[kind] * (rng.random() if rng.random() < 0.3 else 1.0)
    seed, plausible = rng.randrange(10**9), rng.random() < PLAUSIBLE_SHARE
    if plausible and kind in PLAUSIBLE_KINDS:
        return plausible_document(kind, seed), rng
    return compose_document(kind, seed, round(level, 1)), rng


def validation_items(per_kind: int, level: float, first_seed: int) -> list[tuple[Document, QuestionSet]]:
    """The fixed documents of every kind, with all their questions; once more with one before the image.

    Plausible documents, in fonts that training draws too, count as kinds of their own.
    """
    documents = [
        compose_document(kind, first_seed + number, level) for kind in KINDS for number in range(per_kind)
    ]
    for kind in PLAUSIBLE_KINDS:
        drawn = [plausible_document(kind, number) for number in range(per_kind)]
        documents += [replace(document, kind=f"plausible {kind}") for document in drawn]
    items = []
    for number, document in enumerate(documents):
        items.append((document, QuestionSet(list(document.questions))))
        question = document.questions[number % per_kind % len(document.questions)]
        items.append((document, QuestionSet([question], True)))
    return items
