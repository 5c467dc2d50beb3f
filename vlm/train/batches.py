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
    compose_document,
)
from vlm.train.drawing.plausible import PLAUSIBLE_KINDS, plausible_document
from vlm.train.drawing.tiles import cut, patch_targets
from vlm.train.prompts import PromptBuilder, Sequence
from vlm.train.questions import QuestionSet, ask_of_two, choose_questions

PLAUSIBLE_SHARE = 0.65  # of all kinds but shapes; the rest keeps to the narrow domain
PAIR_SHARE = 0.05  # of the documents come with another one


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


def collate(items: list[tuple[Document, QuestionSet]], builder: PromptBuilder) -> Batch:
    """Documents with the questions to ask of each."""
    sequences, answers = [], []
    tiles: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    uses: list[int] = []
    seen: dict[bytes, int] = {}
    wanted = 0
    for document, asked in items:
        grids = []
        for shown in (document, *asked.further):
            pieces = cut(shown.image)
            grids.append(pieces.grid)
            marks = patch_targets(shown.glyphs, shown.spots, pieces.grid)
            for tile, targets in zip(pieces.pixels, marks, strict=True):
                number = seen.setdefault(tile.tobytes(), len(tiles))
                if number == len(tiles):
                    tiles.append(tile)
                    characters.append(targets)
                uses.append(number)
        sequence: Sequence = builder.sequence(
            grids,
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


def draw_asked(
    index: int, run_seed: int, mix: dict[str, float], levels: dict[str, float], builder: PromptBuilder
) -> tuple[Document, QuestionSet]:
    """Training document number `index` with what is asked of it, now and then beside a second one."""
    document, rng = draw(index, run_seed, mix, levels)
    if rng.random() >= PAIR_SHARE:
        return document, choose_questions(rng, document, builder)
    second, _ = draw(rng.randrange(10**9, 2 * 10**9), run_seed, mix, levels)
    return document, ask_of_two(rng, document, second)


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
