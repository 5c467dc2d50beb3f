"""Tiling rules: users.md D10, P12, and equality with the reference processor's grid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.encoder_config import EncoderConfigError
from llm.decoder_config import ConfigError
from preprocess.tiling import AspectGridTiling, Idefics3Tiling, tiling_from_json
from preprocess.types import TileGrid, TilingRule
from vlm.families.base import image_processor
from vlm.families.tiled import idefics3

SIDES = st.integers(1, 6_000)
RULES: list[TilingRule] = [
    Idefics3Tiling(tile_size=512, longest_edge=2048),
    Idefics3Tiling(tile_size=364, longest_edge=1456),
    Idefics3Tiling(tile_size=384, longest_edge=700, split=False),
    AspectGridTiling(),
    AspectGridTiling(tile_size=448, max_tiles=6, thumbnail=False),
]


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=200)
@given(SIDES, SIDES, st.sampled_from(["auto", "low", "high"]))
def test_plan_ends_at_a_canvas_that_the_grid_fills(
    rule: TilingRule, width: int, height: int, detail: str
) -> None:
    plan = rule.plan(width, height, detail)
    grid = plan.grid
    assert grid == rule.grid(width, height, detail)
    assert (grid.rows == 0) == (grid.cols == 0)
    assert grid.num_tiles >= 1
    assert plan.steps[-1] == (max(grid.cols, 1) * grid.tile_width, max(grid.rows, 1) * grid.tile_height)
    if detail == "low":
        assert (grid.rows, grid.cols, grid.num_tiles) == (0, 0, 1)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=200)
@given(SIDES, SIDES)
def test_d10_turning_the_image_turns_the_grid(rule: TilingRule, width: int, height: int) -> None:
    grid, turned = rule.grid(width, height), rule.grid(height, width)
    if width == height:
        return
    if isinstance(rule, Idefics3Tiling) or grid.rows * grid.cols == turned.rows * turned.cols:
        assert (grid.rows, grid.cols) == (turned.cols, turned.rows)


def test_d10_known_pair() -> None:
    rule = Idefics3Tiling(tile_size=364, longest_edge=1456)
    assert rule.grid(1084, 820) == TileGrid(4, 4, True, 364, 364)
    assert rule.grid(1456, 728) == TileGrid(2, 4, True, 364, 364)
    assert rule.grid(728, 1456) == TileGrid(4, 2, True, 364, 364)


def test_small_models_tile_holds_the_whole_image() -> None:
    grid = Idefics3Tiling(tile_size=128, longest_edge=128).grid(900, 300)
    assert (grid.rows, grid.cols, grid.num_tiles) == (0, 0, 1)


@pytest.mark.parametrize(
    ("width", "height", "rows", "cols", "tiles"),
    [
        (4000, 3000, 3, 4, 13),
        (3000, 4000, 4, 3, 13),
        (384, 384, 0, 0, 1),
        (1600, 1600, 3, 3, 10),
        (4600, 384, 1, 12, 13),
        (100, 100, 0, 0, 1),
    ],
)
def test_aspect_grid_of_the_articles(width: int, height: int, rows: int, cols: int, tiles: int) -> None:
    grid = AspectGridTiling().grid(width, height)
    assert (grid.rows, grid.cols, grid.num_tiles) == (rows, cols, tiles)


@settings(deadline=None, max_examples=200)
@given(SIDES, SIDES)
def test_aspect_grid_is_the_nearest_shape_allowed(width: int, height: int) -> None:
    grid = AspectGridTiling().grid(width, height)
    rows, cols = max(grid.rows, 1), max(grid.cols, 1)
    assert 1 <= rows * cols <= 12
    assert grid.thumbnail
    ours = abs(width / height - cols / rows)
    assert all(ours <= abs(width / height - c / r) for r in range(1, 13) for c in range(1, 12 // r + 1))


@pytest.mark.parametrize("rule", RULES)
def test_json_round_trip(rule: TilingRule) -> None:
    assert tiling_from_json(json.loads(json.dumps(rule.to_json()))) == rule


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"rule": "other"},
        {"rule": "idefics3", "tile_size": 4},
        {"rule": "aspect_grid", "tiles": 3},
        {"rule": "aspect_grid", "tile_size": 0},
        {"rule": "aspect_grid", "min_tiles": 5, "max_tiles": 4},
    ],
)
def test_malformed_json_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"tiling rule|positive|min_tiles"):
        tiling_from_json(raw)


def test_config_of_the_default_model() -> None:
    config = json.loads((Path(__file__).parent.parent / "vlm/model/processor_config.json").read_text())
    section = config["image_processor"]
    rule = idefics3.tiling(section)
    assert rule.tile_size == section["max_image_size"]["longest_edge"]
    assert rule.longest_edge == section["size"]["longest_edge"]


@pytest.mark.parametrize(
    "section",
    [
        {"size": {"height": 3, "width": 4}},
        {"do_resize": False},
        {"max_image_size": {"longest_edge": "512"}},
    ],
)
def test_settings_that_the_rule_does_not_have_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(EncoderConfigError, match=r"longest_edge|do_resize"):
        idefics3.tiling(section)


def test_another_familys_processor_is_refused() -> None:
    files = {"preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"}}
    with pytest.raises(ConfigError, match="image_processor_type must be one of Idefics3ImageProcessor"):
        image_processor(files, idefics3.PROCESSORS)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "edge"), [(32, 128), (28, 100), (16, 130), (64, 64), (30, 45)])
def test_d10_grid_equals_the_reference_processors(tile: int, edge: int) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    reference = SmolVLMImageProcessorPil(size={"longest_edge": edge}, max_image_size={"longest_edge": tile})
    rule = Idefics3Tiling(tile_size=tile, longest_edge=edge)
    random = np.random.default_rng(tile)
    for width, height in [
        (1084, 820),
        (820, 1084),
        *np.exp(random.uniform(0, 7, (40, 2))).astype(int).tolist(),
    ]:
        if max(width, height) > 40 * min(width, height):
            continue
        image = np.zeros((height, width, 3), np.uint8)
        out = reference(image, return_row_col_info=True, input_data_format="channels_last")
        grid = rule.grid(width, height)
        assert ([[grid.rows]], [[grid.cols]]) == (out["rows"], out["cols"])
        assert grid.num_tiles == out["pixel_values"][0].shape[0]
