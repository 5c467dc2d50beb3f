import json

import pytest
import torch
from train_fixtures import MODEL

from vlm.train.drawing.geometry import Shape
from vlm.train.drawing.tiles import LONGEST_EDGE
from vlm.train.evaluate import evaluate, held_out_documents
from vlm.train.generate import answerer


def test_the_shipped_directory_is_within_its_limits_and_cuts_as_training_does() -> None:
    processor = json.loads((MODEL / "processor_config.json").read_text())
    assert processor["image_processor"]["size"] == {"longest_edge": LONGEST_EDGE}
    assert processor["image_processor"]["max_image_size"] == {"longest_edge": 128}
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000
    assert Shape.read(MODEL).fold == 2
    card = (MODEL / "README.md").read_text()
    assert all(heading in card for heading in ("## Domain", "## Accuracy", "## Failures", "## Licences"))
    assert "@" not in card


@pytest.mark.slow
def test_the_shipped_model_reads_held_out_documents_and_guesses_nothing_from_empty_pages() -> None:
    torch.set_num_threads(1)
    asked = ("total", "date", "caption")
    documents = held_out_documents(24, kinds=("receipt", "invoice", "shapes"), first_seed=1_900_000_000)
    report = evaluate(answerer(MODEL), documents, lambda question: question.kind in asked, blank=True)
    sales = ("receipt", "invoice")
    assert report.accuracy("total", sales) >= 0.75
    assert report.accuracy("date", sales) >= 0.75
    assert report.accuracy("caption", ("shapes",)) >= 0.7
    assert sum(right for right, _ in report.blank.values()) == 0
