"""What training asks of a document: which questions, in which order, before or behind the image."""

from dataclasses import dataclass, replace
from random import Random

from vlm.train.drawing.documents import Document, Question, preset_questions
from vlm.train.prompts import PromptBuilder

PRESET_SHARE = 0.12
FIRST_SHARE = 0.45
TURNS_SHARE = 0.2  # of the documents that are asked nothing before the image
TURNS = 3
QUESTION_TOKENS = 150  # a document's questions and answers are cut to about this many tokens
PAIRED = 4  # questions about two images
UNPAIRED = ("caption", "absent")  # kinds that name the image themselves, or would have to name both


@dataclass(frozen=True)
class QuestionSet:
    """What is asked of one image; `first`: the only question, written before the image; `turns`: one question
    after the answer to the other; `further`: documents shown behind the one it belongs to."""

    questions: list[Question]
    first: bool = False
    turns: bool = False
    further: tuple[Document, ...] = ()


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


def ask_of_two(rng: Random, first: Document, second: Document) -> QuestionSet:
    """Questions about either of two images, each of which names its image."""
    found = []
    for place, document in (("first", first), ("second", second)):
        for question in document.questions:
            if question.kind not in UNPAIRED:
                found.append(replace(question, text=_of_image(question.text, place)))
    return QuestionSet(rng.sample(found, min(PAIRED, len(found))), further=(second,))


def _of_image(text: str, place: str) -> str:
    body, mark = text[:-1], text[-1]
    return f"{body} {'in' if mark == '?' else 'of'} the {place} image{mark}"
