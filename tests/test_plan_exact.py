"""What `vlm plan image` and `vlm tokens` say equals what a run reports: tiles, tokens and KV bytes."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FakeBackend
from PIL import Image

from encoder.geometry import TowerShape, VisionGeometry
from llm.cost import kv_bytes
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.request import ImageSpan, Prompt, Request, SamplingParams, VisualKey, WantVisual
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.tiling import AspectGridTiling, Idefics3Tiling
from preprocess.types import TileGrid, TilingRule
from vlm.cli.main import app
from vlm.cli.tokens import image_cost
from vlm.families.vision import PlainFormat
from vlm.plan.catalog import load_machine, load_model
from vlm.plan.labs.image_lab import costs_of_images, plan_image
from vlm.prompt import ImagePart, Message, Rows
from vlm.spec import BLOCK_SIZE, ModelSpec

RULES: list[tuple[TilingRule, VisionGeometry]] = [
    (Idefics3Tiling(tile_size=64, longest_edge=256), VisionGeometry(64, 16, 2)),
    (
        AspectGridTiling(tile_size=54, max_tiles=12),
        VisionGeometry(54, 2, 2),
    ),  # 27x27 patches, pooled to 14x14
]
DECODER, MACHINE = load_model("7b-mha").decoder, load_machine("h100")


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights from 4 to 700, many of them narrow."""
    draw = random.Random(seed)
    return [(round(2 ** draw.uniform(2, 9.45)), round(2 ** draw.uniform(2, 9.45))) for _ in range(count)]


def picture(size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 100, 50)).save(buffer, "PNG")
    return buffer.getvalue()


class Visuals:
    """Holds whatever is asked for, as rows of hashes."""

    def __init__(self) -> None:
        self.rows: dict[VisualKey, np.ndarray] = {}

    def get(self, key: VisualKey) -> np.ndarray | None:
        return self.rows.get(key)

    def hold(self, key: VisualKey) -> None: ...

    def release(self, key: VisualKey) -> None: ...

    def failed(self, key: VisualKey) -> tuple[str, str] | None:
        return None


def blocks_of_a_run(prompt: Prompt, visual_tokens: int) -> int:
    """KV blocks that the engine holds once the prompt is computed and one token has come."""
    backend = FakeBackend(num_blocks=1024, block_size=BLOCK_SIZE, max_positions=BLOCK_SIZE * 1024)
    visuals = Visuals()
    config = EngineConfig(max_step_tokens=1 << 15, step_stretch=None)
    engine = Engine(backend, visuals, config, Letters(), frozenset())
    engine.submit(Request("r", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    for _ in range(4):
        for event in engine.step():
            if isinstance(event, WantVisual):
                visuals.rows[event.key] = np.arange(visual_tokens, dtype=np.uint64)
        if engine.stats().generated_tokens:
            break
    assert engine.stats().generated_tokens == 1
    return engine.stats().kv_blocks_held


class Letters:
    """A tokenizer of which only the text stream is needed."""

    strips_first_space = False

    def decoder(self, skip_special: bool | None = None) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(("rule", "geometry"), RULES, ids=["idefics3", "aspect_grid"])
def test_200_random_sizes_cost_what_their_run_reports(rule: TilingRule, geometry: VisionGeometry) -> None:
    tower = TowerShape(geometry, 2, 48, 96, 64)
    spec = PreprocessSpec(rule)
    for size in sizes(200, seed=5):
        data = picture(size)
        info = probe(data, ImageLimits())
        (cost,) = costs_of_images([(info.width, info.height)], rule, tower, DECODER)
        tiles = preprocess(data, spec, ImageLimits())
        assert (cost.tiles, cost.rows, cost.cols) == (len(tiles.pixels), tiles.grid.rows, tiles.grid.cols)
        (rows,) = PlainFormat(1, geometry).pieces(tiles.grid, 0, 1)
        assert isinstance(rows, Rows) and cost.visual_tokens == rows.count
        assert cost.kv_bytes == kv_bytes(DECODER, rows.count)


@pytest.mark.parametrize(("rule", "geometry"), RULES, ids=["idefics3", "aspect_grid"])
def test_the_engine_holds_the_planned_kv_bytes(rule: TilingRule, geometry: VisionGeometry) -> None:
    tower = TowerShape(geometry, 2, 48, 96, 64)
    block_bytes = kv_bytes(DECODER, BLOCK_SIZE)
    for size in sizes(60, seed=6):
        (cost,) = costs_of_images([size], rule, tower, DECODER)
        text = 5
        span = ImageSpan(2, cost.visual_tokens, VisualKey("a" * 64), 0)
        prompt = Prompt((1, 2) + (3,) * cost.visual_tokens + (4, 5, 6), (span,))
        plan = plan_image(
            DECODER, tower, MACHINE, [rule.grid(*size)], text, block_size=BLOCK_SIZE, per_image=(cost,)
        )
        assert plan.prompt_tokens == prompt.num_tokens
        held = blocks_of_a_run(prompt, cost.visual_tokens)
        assert held * block_bytes == plan.kv_per_request_bytes


@pytest.mark.parametrize("seed", range(3))
def test_vlm_tokens_equals_the_plan_and_the_prompt(seed: int) -> None:
    spec, model = default_spec(), load_model("default")
    assert model.tower is not None and model.tiling is not None
    for size in sizes(70, seed=10 + seed):
        data = picture(size)
        shown = image_cost(spec, data, "auto")
        (cost,) = costs_of_images([size], model.tiling, model.tower, model.decoder)
        assert (shown["tiles"], shown["rows"], shown["cols"]) == (cost.tiles, cost.rows, cost.cols)
        assert shown["image_tokens"] == cost.visual_tokens
        grid: TileGrid = model.tiling.grid(*size)
        part = ImagePart(grid, VisualKey("b" * 64))
        with_image = spec.prompt_builder.build([Message("user", (part, "x"))])
        assert with_image.num_image_tokens == cost.visual_tokens
        assert shown["prompt_tokens"] == spec.image_prompt_tokens(grid)
        assert shown["kv_bytes"] == kv_bytes(model.decoder, shown["prompt_tokens"], 4, BLOCK_SIZE)


@pytest.mark.parametrize("detail", ["auto", "low"])
def test_tokens_and_plan_image_tell_the_same_kv_bytes(
    detail: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markers and whole blocks included, as the engine stores an image's part of a prompt."""
    paths = []
    for index, size in enumerate(sizes(8, seed=3)):
        paths.append(str(tmp_path / f"{index}.png"))
        Path(paths[-1]).write_bytes(picture(size))

    def told(*command: str) -> list[tuple[int, int]]:
        app([*command, *paths, "--model", "default", "--detail", detail, "--json"], standalone_mode=False)
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])
        return [
            (row["prompt_tokens"], row["kv_bytes"])
            for row in rows["per_image" if "per_image" in rows else "images"]
        ]

    assert told("tokens") == told("plan", "image")


@cache
def default_spec() -> ModelSpec:
    return ModelSpec.load("default")
