"""Gemma 3's own traps: pan and scan, line feeds that merge, roles."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family_checkpoints import CASES, make_checkpoint
from gemma3_sizes import config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_end_to_end import png
from test_family_fidelity import Loaded, chat, flat, inputs_of, noise

from encoder.encoder_config import EncoderConfigError
from llm.decoder_config import ConfigError
from llm.request import RequestError, VisualKey
from preprocess.stage import PreprocessSpec, preprocess, tiles_key
from preprocess.tiling import SquashTiling
from vlm.checkpoint import Checkpoint
from vlm.families.tiled import gemma3
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec

RULE = SquashTiling(56, min_crop=20)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    from transformers import AutoImageProcessor, AutoProcessor

    (case,) = (case for case in CASES if case.name == "gemma3_wide_window")
    directory = make_checkpoint(case, tmp_path_factory.mktemp("gemma"), seed=1)
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return Loaded(case, directory, ModelSpec.load(directory, variant="exact"), processor)


def test_pan_and_scan_gives_the_processors_ids_and_pixels(loaded: Loaded) -> None:
    draw, spec = random.Random(3), replace(loaded.spec, preprocess=replace(loaded.spec.preprocess, rule=RULE))
    sizes = [(draw.randint(1, 200), draw.randint(1, 200)) for _ in range(60)]
    for width, height in [*sizes, (20, 24), (24, 20), (19, 90), (100, 40), (101, 40), (39, 160), (500, 41)]:
        image = noise(width, height, seed=width)
        text = loaded.processor.apply_chat_template(chat([image], "What?", False), add_generation_prompt=True)
        inputs = loaded.processor(
            text=text,
            images=[image],
            do_pan_and_scan=True,
            pan_and_scan_min_crop_size=20,
            return_tensors="pt",
        )
        part = ImagePart(RULE.grid(width, height, "high"), VisualKey("a" * 64))
        prompt = spec.prompt_builder.build([Message("user", (part, "What?"))])
        assert list(prompt.token_ids) == inputs["input_ids"][0].tolist(), (width, height)
        tiles = preprocess(png(image), spec.preprocess_spec("high")).pixels
        ours = (np.concatenate((tiles[-1:], tiles[:-1])).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
        assert np.abs(ours - inputs["pixel_values"].numpy()).max() < 2e-6
        crops = sorted(span.offset for span in prompt.spans)
        assert crops == [16 * i for i in range(len(tiles))]


def test_only_detail_high_crops_and_has_a_key_of_its_own() -> None:
    specs = [PreprocessSpec(RULE, detail) for detail in ("auto", "low", "high")]
    keys = [tiles_key("d" * 64, spec) for spec in specs]
    assert keys[0] == keys[1] != keys[2]
    assert [spec.rule.grid(200, 50, spec.detail).num_tiles for spec in specs] == [1, 1, 5]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_crops_cover_the_image_without_overlap(width: int, height: int) -> None:
    plan = SquashTiling(896).plan(width, height, "high")
    assert len(plan.boxes) in (0, 2, 3, 4)
    if plan.boxes:
        area = sum((right - left) * (bottom - top) for left, top, right, bottom in plan.boxes)
        assert area == width * height
        assert all(
            left < right <= width and top < bottom <= height for left, top, right, bottom in plan.boxes
        )


@pytest.mark.parametrize("question", ["\n", "\n\n\nx", "x\n\n", "a\n\nb"])
@pytest.mark.parametrize("text_first", [False, True])
def test_line_feeds_around_an_image_merge_as_the_processors_do(
    loaded: Loaded, question: str, text_first: bool
) -> None:
    grid = loaded.spec.preprocess.rule.grid(30, 30, "low")
    part = ImagePart(grid, VisualKey("a" * 64))
    content = (question, part) if text_first else (part, question)
    prompt = loaded.spec.prompt_builder.build([Message("user", content)])
    want = inputs_of(loaded, [flat(30, 30)], question, text_first)["input_ids"][0].tolist()
    assert list(prompt.token_ids) == want


def test_a_system_text_is_merged_and_the_assistant_is_the_model(loaded: Loaded) -> None:
    prompt = loaded.spec.prompt_builder.build(
        [Message("system", ("be brief",)), Message("user", ("hi",)), Message("assistant", ("ho",))]
    )
    text = loaded.spec.tokenizer.decode(prompt.token_ids, skip_special=False)
    assert "<start_of_turn>user\nbe brief\n\nhi<end_of_turn>" in text and "<start_of_turn>model\nho" in text


def test_published_sizes() -> None:
    """Google's 4B: 256 tokens an image, head_dim 256, a full layer in six, tied head."""
    config = config_of("4b")
    checkpoint = Checkpoint(Path(), config)
    encoder, decoder = gemma3.encoder(config, {}), checkpoint.decoder
    assert encoder.geometry.tokens_per_tile == 256 and encoder.tower.num_patches == 4096
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (8, 4, 256)
    assert [i for i, window in enumerate(decoder.windows) if not window] == [5, 11, 17, 23, 29]
    assert decoder.tied_embeddings and decoder.whole_spans and decoder.query_scale == 1.0
    shape = checkpoint.shape
    assert shape.num_sliding_layers == 29 and 3.8e9 < shape.num_params < 3.95e9


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"text_config": {"final_logit_softcapping": 30.0}}, "softcapping"),
        ({"text_config": {"use_bidirectional_attention": True}}, "bidirectional"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises((EncoderConfigError, ConfigError, RequestError), match=named):
        gemma3.encoder({"model_type": "gemma3", "vision_config": {"image_size": 256}} | extra, {})
