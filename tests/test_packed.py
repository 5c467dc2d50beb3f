"""Images whose visual tokens are packed by their own ratio: sizes, counts, keys, and what travels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_checkpoints import CASES, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import CANVASES
from transformers import AutoConfig
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from encoder.encoder_config import EncoderConfigError
from encoder.geometry import VisionGeometry
from encoder.packing import Packing, pack
from preprocess.anyres import AnyResTiling
from preprocess.stage import PreprocessSpec, preprocess, tiles_key
from preprocess.tiling import tiling_from_json
from preprocess.types import TileGrid
from preprocess.wire import from_bytes, to_bytes
from vlm.build import build_tile_batcher
from vlm.cli.tokens import image_cost
from vlm.config import EngineOptions
from vlm.families.packed import llava_next, llava_onevision
from vlm.loading import load_encoder
from vlm.spec import ModelSpec
from workers.cluster.names import planned_grid
from workers.cluster.worker.encode_worker import EncodeService

from test_end_to_end import png  # isort: skip
from test_family_fidelity import flat, noise  # isort: skip

PUBLISHED = tuple((384 * high, 384 * wide) for high in range(1, 7) for wide in range(1, 7))
RULES = (AnyResTiling(336, llava_next._CANVASES), AnyResTiling(384, PUBLISHED))
SIDES = st.integers(1, 4000)


@given(width=SIDES, height=SIDES, rule=st.sampled_from(RULES))
@settings(max_examples=400, deadline=None)
def test_canvas_and_size_on_it_are_the_references(width: int, height: int, rule: AnyResTiling) -> None:
    plan = rule.plan(width, height)
    want = select_best_resolution((height, width), rule.canvases)
    if want is None:  # nothing is left of the image: the reference fails
        want = rule.canvases[0]
    assert plan.canvas == want[::-1]
    assert (plan.grid.rows * rule.tile_size, plan.grid.cols * rule.tile_size) == want
    pixels = np.empty((3, height, width), np.uint8) if width * height < 10**6 else None
    if pixels is not None:
        fitted = get_patch_output_size(pixels, want, input_data_format="channels_first")
        assert plan.steps == (fitted[::-1],)


@given(width=SIDES, height=SIDES, most_tiles=st.sampled_from([4, 9, 10**6]))
@settings(max_examples=400, deadline=None)
def test_token_counts_are_the_references(width: int, height: int, most_tiles: int) -> None:
    grid = RULES[1].grid(width, height)
    reference: Any = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=PUBLISHED),
        num_image_tokens=27 * 27,
        vision_aspect_ratio=f"anyres_max_{most_tiles}",
    )
    reference._get_unpadded_features = lambda *args: LlavaOnevisionProcessor._get_unpadded_features(
        reference, *args
    )
    if select_best_resolution((height, width), PUBLISHED) is None:
        return
    want = LlavaOnevisionProcessor._get_number_of_features(reference, height, width, 384, 384)
    geometry = VisionGeometry(384, 14, 1, Packing(most_tiles))
    assert geometry.rows(grid) == want


@given(width=st.integers(1, 400), height=st.integers(1, 400), most_tiles=st.sampled_from([0, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_packed_tokens_are_the_images_rows_and_as_many_as_planned(
    width: int, height: int, most_tiles: int
) -> None:
    side, packing = 4, Packing(most_tiles)
    grid = AnyResTiling(28, tuple(map(tuple, CANVASES))).grid(width, height)  # type: ignore[arg-type]
    rows = torch.randn(grid.num_tiles * side * side, 3)
    newline = torch.full((3,), 9.0)
    packed = pack(rows, newline, packing, side, grid)
    assert len(packed) == packing.num_rows(side, grid)
    assert torch.equal(packed[: side * side], rows[-side * side :]), "the whole image comes first"
    if not most_tiles:
        tiles = rows[: -side * side].view(grid.rows, grid.cols, side, side, 3)
        canvas = tiles.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
        want = unpad_image(canvas, (height, width))
        lines = torch.cat((want, newline[:, None, None].expand(3, want.shape[1], 1)), 2)
        assert torch.equal(packed[side * side :], lines.flatten(1).T)


def test_low_detail_is_one_tile_and_has_a_key_of_its_own() -> None:
    spec = PreprocessSpec(RULES[0])
    low = replace(spec, detail="low")
    assert low.rule.grid(1000, 400, "low") == TileGrid(0, 0, True, 336, 336, 1000, 400)
    assert VisionGeometry(336, 14, 1, Packing()).rows(low.rule.grid(1000, 400, "low")) == 24 * 24 + 1
    assert tiles_key("a" * 64, low) != tiles_key("a" * 64, spec)
    assert preprocess(png(noise(60, 30, 1)), low).pixels.shape == (1, 336, 336, 3)


def test_canvases_are_part_of_the_rule_and_of_the_keys() -> None:
    fewer = AnyResTiling(336, RULES[0].canvases[:2])
    assert tiles_key("a" * 64, PreprocessSpec(fewer)) != tiles_key("a" * 64, PreprocessSpec(RULES[0]))
    listed = RULES[0].to_json() | {"canvases": [list(canvas) for canvas in RULES[0].canvases]}
    assert tiling_from_json(listed) == RULES[0]


@pytest.mark.parametrize("canvases", [(), ((336, 100),), ((0, 336),)])
def test_canvases_that_are_no_tiles_are_refused(canvases: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"canvas"):
        AnyResTiling(336, canvases)


def test_the_images_size_reaches_who_packs_whichever_way_tiles_travel() -> None:
    tiles = preprocess(png(noise(75, 40, 1)), PreprocessSpec(RULES[0]))
    assert from_bytes(to_bytes(tiles), tiles.grid).grid == tiles.grid
    assert planned_grid(tiles.grid.numbers) == tiles.grid
    plain = TileGrid(1, 2, True, 28, 28)
    assert len(plain.numbers) == 5, "readers of before the size was known take it"
    assert planned_grid(plain.numbers) == plain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "granite_vision")
    return make_checkpoint(case, tmp_path_factory.mktemp("packed"), seed=5)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "llava_onevision")
    return make_checkpoint(case, tmp_path_factory.mktemp("packed"), seed=5)


def test_costs_from_the_header_are_the_tokens_that_come(checkpoint: Path) -> None:
    spec, encoder = ModelSpec.load(checkpoint), load_encoder(checkpoint)
    for size in ((75, 40), (40, 91), (20, 20), (7, 300), (1, 1)):
        told = image_cost(spec, png(flat(*size)), "auto")
        tiles = preprocess(png(flat(*size)), spec.preprocess_spec("auto"))
        rows = encoder.pack(encoder.encode([tiles.pixels])[0], tiles.grid)
        assert told["image_tokens"] == len(rows)
        assert told["tiles"] == len(tiles.pixels)


def test_an_encode_worker_packs_as_the_engine_does(checkpoint: Path) -> None:
    spec, encoder = ModelSpec.load(checkpoint), load_encoder(checkpoint)
    tiles = preprocess(png(noise(75, 40, 1)), spec.preprocess_spec("auto"))
    want = encoder.pack(encoder.encode([tiles.pixels])[0], tiles.grid)
    options = EngineOptions(model=str(checkpoint))
    service = EncodeService(lambda progress: build_tile_batcher(options, progress), on_crash=lambda: None)
    service.start()
    try:
        sent = from_bytes(to_bytes(tiles), planned_grid(list(tiles.grid.numbers)))
        assert torch.equal(service.encode("a", sent), want)
    finally:
        service.close()


def test_an_image_spread_over_steps_is_packed_once_it_is_whole(checkpoint: Path) -> None:
    spec, encoder = ModelSpec.load(checkpoint), load_encoder(checkpoint)
    tiles = preprocess(png(noise(150, 140, 1)), spec.preprocess_spec("auto"))
    want = encoder.pack(encoder.encode([tiles.pixels])[0], tiles.grid)
    cache = VisualCache(1 << 20)
    batcher = TileBatcher(encoder.encode, cache, num_rows=encoder.num_rows, packer=encoder, max_tiles=2)
    cache.hold("a")
    assert batcher.put_tiles("a", tiles.pixels, grid=tiles.grid)
    steps = 0
    while batcher.due_in() == 0.0:
        batcher.step()
        steps += 1
    assert steps > 1
    assert torch.equal(cache.get("a"), want)
    assert not batcher.put_tiles("a", tiles.pixels, grid=tiles.grid), "it is cached, at its packed length"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"vision_feature_layer": 0}, "vision_feature_layer"),
        ({"vision_feature_layer": [-2, -25]}, "vision_feature_layer"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(EncoderConfigError, match=named):
        llava_next.encoder(config, {})


@pytest.mark.parametrize(
    ("processor", "named"),
    [
        ({"size": {"shortest_edge": 224}}, "size"),
        ({"image_grid_pinpoints": [[336, 336]]}, "image_grid_pinpoints"),
    ],
)
def test_a_processor_that_disagrees_with_the_model_is_refused(processor: dict[str, Any], named: str) -> None:
    config = {"image_grid_pinpoints": [[336, 672]]}
    with pytest.raises(EncoderConfigError, match=named):
        llava_next.preprocess(config, processor, "exact")


def test_an_image_among_others_is_one_square_tile_with_a_key_of_its_own(onevision: Path) -> None:
    spec = ModelSpec.load(onevision, variant="exact")
    alone, among = spec.preprocess_spec("auto"), spec.preprocess_spec("auto", 2)
    assert spec.preprocess_spec("auto", 3) == among
    assert tiles_key("a" * 64, alone) != tiles_key("a" * 64, among)
    assert spec.visual_key("a" * 64, alone) != spec.visual_key("a" * 64, among)
    assert spec.geometry.rows(among.rule.grid(75, 40)) == 4 * 4 + 1
    tile = preprocess(png(flat(75, 40)), among).pixels
    assert tile.shape == (1, 28, 28, 3)
    assert tile[0, 0, 0].tolist() == [51, 127, 178], "the margins have the processor's mean"
    assert tile[0, 14, 14].tolist() == [0, 0, 0]
    assert tiling_from_json(json.loads(json.dumps(among.rule.to_json()))) == among.rule
    assert tiling_from_json(json.loads(json.dumps(alone.rule.to_json()))) == alone.rule


def test_a_model_without_that_mode_takes_many_images_as_one(checkpoint: Path) -> None:
    spec = ModelSpec.load(checkpoint)
    assert spec.preprocess_spec("auto", 2) is spec.preprocess_spec("auto")


@pytest.mark.parametrize("aspect", ["anyres", "anyres_max_0", "anyres_max_9x", "pad"])
def test_an_unknown_aspect_is_refused(aspect: str) -> None:
    with pytest.raises(EncoderConfigError, match="vision_aspect_ratio"):
        llava_onevision.encoder({"vision_aspect_ratio": aspect}, {})


@pytest.mark.parametrize("vision", [None, {}, {"hidden_size": 96}, {"model_type": "siglip_vision_model"}])
@pytest.mark.parametrize("family", [llava_next, llava_onevision])
def test_what_a_config_leaves_out_is_what_its_class_has(vision: dict[str, Any] | None, family: Any) -> None:
    model_type = family.FAMILY.model_types[0]
    sparse: dict[str, Any] = {} if vision is None else {"vision_config": vision}
    if vision and "model_type" in vision:
        sparse["vision_feature_select_strategy"] = "full"
    whole = AutoConfig.for_model(model_type, **sparse).to_dict()
    assert family.encoder(sparse, {}) == family.encoder(whole, {})
    assert family.decoder(sparse) == family.decoder(whole)
