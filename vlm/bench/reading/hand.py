"""Pages that no generator drew: receipts, labels and signs laid out one by one, with their questions."""

import json
from collections.abc import Iterator
from importlib.resources import files

from PIL import Image

from vlm.train.drawing.documents import Document, Question


def hand_documents() -> Iterator[Document]:
    """The pages of `hand/` with the questions of `questions.json`, whose further answers are right too."""
    folder = files("vlm.bench.reading") / "hand"
    for page in json.loads((folder / "questions.json").read_text()):
        with (folder / page["image"]).open("rb") as file:
            image = Image.open(file).convert("RGB")
        questions = tuple(
            Question(one["kind"], one["question"], one["answers"][0], tuple(one["answers"][1:]))
            for one in page["questions"]
        )
        yield Document(page["kind"], image, questions)
