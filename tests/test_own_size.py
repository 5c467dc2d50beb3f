"""Images that a tower takes whole, at a size of their own: rules, counts, encoding."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from family_checkpoints import CASES, make_checkpoint
from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize as two_frames_resize
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as paddle_resize
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from typer.testing import CliRunner

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from encoder.encoder_model import Encoder
from encoder.geometry import TileShape, VisionGeometry
from preprocess.own_size import LOW_DETAIL_PIXELS, AreaResize, EdgeResize, capped
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.tiling import AspectGridTiling, tiling_from_json
from preprocess.types import TilingRule
from vlm.cli.main import app
from vlm.cli.tokens import image_cost
from vlm.config import CPU_PIXELS, EngineOptions
from vlm.loading import load_encoder
from vlm.spec import ModelSpec

from test_end_to_end import png  # isort: skip

AREAS = (AreaResize(28, 3136, 1_003_520), AreaResize(32, 65_536, 16_777_216), AreaResize(28, 50_176, 100_000))
EDGES = (EdgeResize(1540, 28), EdgeResize(1024, 16), EdgeResize(1540, 14))
GLM = AreaResize(28, 112 * 112 // 2, 28 * 28 * 15000 // 2, grows_whole=True)
RULES = (*AREAS, AreaResize(28, 147_456, 2_359_296, grows_sides=True), GLM, *EDGES)


def sides(count: int) -> list[tuple[int, int]]:
    """Log-uniform in 1..4096, around multiples of the factors, and the extremes."""
    draw = random.Random(3)
    found = [(round(2 ** draw.uniform(0, 12)), round(2 ** draw.uniform(0, 12))) for _ in range(count)]
    multiples = [factor * i for factor in (28, 32) for i in (0, 1, 2, 35, 36, 73)]
    near = [max(1, side + off) for side in multiples for off in (-1, 0, 1)]
    near += [14, 42, 70, 16, 48]  # halves of a factor, where rounding is to even
    found += itertools.product(near, near)
    return [(w, h) for w, h in found if max(w, h) <= 200 * min(w, h)]


def glm_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Of the two frames that a still image is there, whose pixels the bounds count."""
    return two_frames_resize(2, height, width, 2, factor, 2 * least, 2 * most)


class Sized:
    """What the reference asks of an array: its shape, channels first."""

    def __init__(self, width: int, height: int) -> None:
        self.shape, self.ndim = (3, height, width), 3


def size_of(rule: TilingRule, width: int, height: int) -> tuple[int, int]:
    """(height, width), as references give it."""
    grid = rule.grid(width, height)
    assert (grid.rows, grid.cols, grid.num_tiles) == (0, 0, 1)
    return grid.tile_height, grid.tile_width


def check_rule(rule: TilingRule, count: int) -> None:
    """Equal to the reference's on so many random sizes and more; it takes all but those of which it leaves
    nothing and those that it refuses as too thin."""
    for width, height in sides(count):
        if isinstance(rule, EdgeResize):
            want = get_resize_output_image_size(
                Sized(width, height), rule.longest_edge, rule.multiple, input_data_format="channels_first"
            )
        else:
            resize = glm_resize if rule.grows_whole else paddle_resize if rule.grows_sides else smart_resize
            try:
                want = resize(height, width, rule.factor, rule.min_pixels, rule.max_pixels)
            except ValueError:
                continue
        if 0 not in want:
            assert size_of(rule, width, height) == want, (width, height)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sizes_are_those_of_the_reference(rule: TilingRule) -> None:
    check_rule(rule, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_50_000_sizes_are_those_of_the_reference(rule: TilingRule) -> None:
    check_rule(rule, 50_000)


@pytest.mark.parametrize("max_pixels", [210_000, 401_408, 1_003_520])
@pytest.mark.parametrize("rule", [*AREAS, *EDGES])
def test_a_cap_holds(rule: TilingRule, max_pixels: int) -> None:
    lower = capped(rule, max_pixels)
    assert all(math.prod(size_of(lower, *size)) <= max_pixels for size in sides(300))


@pytest.mark.parametrize("size", [(640, 480), (2000, 2000), (3000, 200), (1654, 2339)])
def test_a_cap_on_an_edge_is_the_largest_edge_that_the_reference_could_have(size: tuple[int, int]) -> None:
    found = size_of(capped(EDGES[0], 401_408), *size)
    edges = {size_of(EdgeResize(edge, 28), *size) for edge in range(1, 1541)}
    assert found == max((one for one in edges if math.prod(one) <= 401_408), key=math.prod)


def test_a_cap_is_part_of_the_rule_and_of_the_keys() -> None:
    rule = AreaResize(28, 3136, 12_845_056)
    lower = capped(rule, CPU_PIXELS)
    assert tiles_key("a", PreprocessSpec(rule)) != tiles_key("a", PreprocessSpec(lower))
    assert tiling_from_json(lower.to_json()) == lower and tiling_from_json(EDGES[0].to_json()) == EDGES[0]
    tiles = AspectGridTiling()
    assert capped(tiles, 1) is tiles
    assert capped(lower, 12_845_056) == lower, "a cap never raises one"


def test_low_detail_is_a_small_image() -> None:
    for rule in (*AREAS, *EDGES):
        grid = rule.grid(3000, 2000, "low")
        assert grid.tile_width * grid.tile_height <= LOW_DETAIL_PIXELS
        assert tiles_key("a", PreprocessSpec(rule, "low")) != tiles_key("a", PreprocessSpec(rule, "high"))


def test_devices_have_caps_of_their_own_and_a_setting_wins() -> None:
    assert EngineOptions().pixel_cap == CPU_PIXELS < EngineOptions(device="cuda").pixel_cap
    assert EngineOptions(device="cuda", max_pixels=300_000).pixel_cap == 300_000


def test_rows_follow_from_the_image_and_not_from_the_number_of_tiles() -> None:
    geometry = VisionGeometry(0, 14, 2)
    assert geometry.rows(TileShape(1, 1008, 756)) == 36 * 27
    assert geometry.num_patches(TileShape(1, 1008, 756)) == 72 * 54
    assert geometry.rows(TileShape(1, 42, 28)) == 1, "a patch that fills no cell has no row"
    assert geometry.tokens_per_tile == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = next(case for case in CASES if case.name == "lighton_ocr")
    return make_checkpoint(case, tmp_path_factory.mktemp("own_size"), seed=1)


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> Encoder:
    return load_encoder(checkpoint)


def image(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (1, height, width, 3), np.uint8)


SHAPES = ((56, 28), (28, 56), (56, 28), (112, 98), (14, 14), (56, 28), (98, 112))


def test_an_image_is_bitwise_the_same_alone_and_in_any_company(encoder: Encoder) -> None:
    images = [image(w, h) + np.uint8(i) for i, (w, h) in enumerate(SHAPES)]
    alone = [encoder.encode([one])[0] for one in images]
    for order in (images, images[::-1], images[2:] + images[:2]):
        together = dict(zip(map(id, order), encoder.encode(order), strict=True))
        assert all(torch.equal(together[id(one)], rows) for one, rows in zip(images, alone, strict=True))
    assert [len(rows) for rows in alone] == [w // 14 * (h // 14) for w, h in SHAPES]


def test_images_of_many_shapes_share_a_queue_in_order_without_padding(encoder: Encoder) -> None:
    cache, encoder.tiles_computed = VisualCache(1 << 24), 0
    batcher = TileBatcher(encoder.encode, cache, num_rows=encoder.num_rows, work=encoder.flops, max_tiles=3)
    for i, (width, height) in enumerate(SHAPES):
        cache.hold(str(i))
        batcher.put_tiles(str(i), image(width, height) + np.uint8(i), "batch" if i % 2 else "interactive")
    finished: list[str] = []
    while batcher.due_in() == 0.0:
        finished += batcher.step().finished
        batcher.check_integrity()
    assert finished == ["0", "2", "4", "6", "1", "3", "5"]
    assert encoder.tiles_computed == len(SHAPES)


def test_a_step_takes_as_many_images_as_it_has_time_for_by_their_work() -> None:
    clock, taken = [0.0], []

    def encode(images: list[np.ndarray]) -> list[np.ndarray]:
        clock[0] += sum(tiles[..., 0].size for tiles in images) / 100  # 100 pixels a second
        taken.append([tiles.shape[1] for tiles in images])
        return [np.zeros((1, 2)) for _ in images]

    cache = VisualCache(1 << 20)
    batcher = TileBatcher(
        encode,
        cache,
        num_rows=len,
        work=lambda tiles: tiles[..., 0].size,
        max_tiles=8,
        max_step_s=2.0,
        clock=lambda: clock[0],
    )
    for i, side in enumerate((10, 10, 5, 5, 20, 10, 5)):
        cache.hold(str(i))
        batcher.put_tiles(str(i), np.zeros((1, side, side, 3), np.uint8))
    while batcher.due_in() == 0.0:
        batcher.step()
    assert taken == [[10], [10, 5, 5], [20], [10, 5]], "one to learn the rate; a large one goes alone"


def test_costs_follow_from_the_header_alone(checkpoint: Path) -> None:
    spec = ModelSpec.load(checkpoint, max_pixels=5_000)
    cost = image_cost(spec, png(np_image(640, 480)), "auto")
    assert (cost["tiles"], cost["image_tokens"]) == (1, 6 * 4)
    assert spec.preprocess.rule.to_json()["max_pixels"] == 5_000
    assert ModelSpec.load(checkpoint).preprocess.rule.to_json()["max_pixels"] == CPU_PIXELS


def np_image(width: int, height: int):  # type: ignore[no-untyped-def]
    from PIL import Image

    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def test_the_planner_shrinks_by_the_cap_of_the_machine(checkpoint: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(png(np_image(640, 480)))

    def tokens(*options: str) -> int:
        command = ["plan", "image", str(photo), "--model", str(checkpoint), "--json", *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        return int(json.loads(done.output)["visual_tokens"])

    assert tokens("--machine", "l40s") == 8 * 6
    assert tokens("--machine", "l40s", "--max-pixels", "5000") == 6 * 4


@pytest.mark.slow
def test_a_capped_page_of_12_megapixels_takes_little_memory_beyond_the_weights() -> None:
    child = Path(__file__).with_name("large_page_child.py")
    done = subprocess.run([sys.executable, child], capture_output=True, text=True, check=True)
    _, most, rows = map(int, done.stdout.split())
    assert most < 640 and 1200 < rows <= 1280  # 447 MiB; 9 GB of scores alone without cap and fused kernel
