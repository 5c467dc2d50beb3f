import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from train_fixtures import MODEL

from preprocess.types import TileGrid
from vlm.train.drawing.documents import compose_document
from vlm.train.drawing.layout import Glyph
from vlm.train.drawing.shapes import Shape, Spot
from vlm.train.drawing.tiles import CLASS_OF, IGNORE, LONGEST_EDGE, RULE, cut, patch_targets
from vlm.train.prompts import PromptBuilder


def test_tiles_and_prompt_are_those_of_the_transformers_processor() -> None:
    from transformers import SmolVLMProcessor

    processor = SmolVLMProcessor.from_pretrained(MODEL)
    processor.image_processor.size = {"longest_edge": LONGEST_EDGE}
    builder = PromptBuilder(MODEL)
    for kind, seed in (
        ("receipt", 3),
        ("receipt", 5),
        ("invoice", 0),
        ("invoice", 5),
        ("shapes", 1),
        ("sign", 2),
    ):
        document = compose_document(kind, seed)
        content = [{"type": "image"}, {"type": "text", "text": document.questions[0].text}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        expected = processor(text=text, images=[document.image], return_tensors="np")
        pieces = cut(document.image)
        asked, _ = builder.segment(document.questions[0].text, "")
        assert builder.prefix(pieces.grid) + asked == expected["input_ids"][0].tolist()
        pixels = (np.asarray(expected["pixel_values"][0]).transpose(0, 2, 3, 1) + 1) * 127.5
        assert np.abs(pixels - pieces.pixels).max() < 1.01


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_every_image_becomes_one_to_four_whole_tiles(width: int, height: int) -> None:
    grid = RULE.grid(width, height)
    assert (grid.tile_width, grid.tile_height, grid.thumbnail) == (128, 128, True)
    assert max(grid.rows, grid.cols) * 128 == LONGEST_EDGE


def test_tiles_put_together_are_the_image() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)
    pieces = cut(Image.fromarray(pixels))
    top = np.concatenate(pieces.pixels[:2], axis=1)
    bottom = np.concatenate(pieces.pixels[2:4], axis=1)
    assert np.array_equal(np.concatenate([top, bottom]), pixels)


def grid(rows: int, cols: int) -> TileGrid:
    return TileGrid(rows, cols, True, 128, 128)


def test_a_character_marks_the_patch_that_holds_its_centre() -> None:
    targets = patch_targets((Glyph("b", 150.0, 24.0, 18.0), Glyph("a", 146.5, 24.0, 18.0)), (), grid(2, 2))
    assert targets.shape == (5, 64, 2)
    assert targets[1, 8 + 1].tolist() == [CLASS_OF["a"], CLASS_OF["b"]]
    assert (targets[[0, 2, 3]] == 0).all()
    assert (targets[4] == IGNORE).all()  # the thumbnail: too small to read


@pytest.mark.parametrize(("x", "unsure"), [(31.9, True), (32.1, True), (33.0, False)])
def test_a_centre_close_to_a_patch_border_takes_no_loss(x: float, unsure: bool) -> None:
    targets = patch_targets((Glyph("a", x, 24.0, 18.0),), (), grid(1, 2))
    assert bool((targets[0, 8 + 1] == IGNORE).all()) == unsure


def test_large_text_is_read_in_the_thumbnail_only() -> None:
    targets = patch_targets((Glyph("a", 100.0, 100.0, 50.0),), (), grid(2, 2))
    assert (targets[:4] == IGNORE).all()
    assert targets[4, 3 * 8 + 3].tolist() == [CLASS_OF["a"], 0]


def test_a_shape_marks_the_patches_inside_it_in_tiles_and_thumbnail() -> None:
    targets = patch_targets((), (Spot(Shape("star", "red"), 64.0, 64.0, 40.0),), grid(2, 2))
    star = [CLASS_OF["star"], CLASS_OF["red"]]
    assert targets[0, 3 * 8 + 3].tolist() == star
    assert targets[0, 0].tolist() == [0, 0]
    assert targets[4, 8 + 1].tolist() == star
    assert (targets[1:4] == 0).all()
