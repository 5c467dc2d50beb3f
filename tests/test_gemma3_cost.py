"""What the planner says of Gemma 3's published sizes, against their formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gemma3_sizes import TEXTS, config_of
from test_plan_cli import call

from llm.cost import (
    DecoderShape,
    Precision,
    decode_time,
    kv_bytes,
    kv_bytes_per_token,
    native_weight_bytes,
    prefill_work,
    step_work,
)
from llm.cost.work import Chunk
from vlm.checkpoint import Checkpoint
from vlm.plan.catalog import load_machine, load_model

WINDOW, VOCAB = 1024, 262208
SIZES = tuple(TEXTS)


def facts(size: str) -> tuple[int, int, int, int, int, int, int]:
    """d_model, d_ff, layers, full layers, heads, KV heads, head_dim."""
    return {
        "4b": (2560, 10240, 34, 5, 8, 4, 256),
        "12b": (3840, 15360, 48, 8, 16, 8, 256),
        "27b": (5376, 21504, 62, 10, 32, 16, 128),
    }[size]


def linear_params(size: str) -> int:
    """What every token is multiplied by, the head aside."""
    d, ff, layers, _, heads, kv, dim = facts(size)
    return layers * (2 * d * heads * dim + 2 * d * kv * dim + 3 * d * ff)


def norm_params(size: str) -> int:
    d, _, layers, *_, dim = facts(size)
    return layers * (4 * d + 2 * dim) + d


def shape_of(size: str) -> DecoderShape:
    return Checkpoint(Path(), config_of(size)).shape


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_four_norms_a_layer_and_one_table(size: str) -> None:
    table = VOCAB * facts(size)[0]
    shape = shape_of(size)
    assert shape.num_params == linear_params(size) + norm_params(size) + table
    assert shape.head_params == table and shape.embed_params == 0  # tied: read as the head, not besides it


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [290, 3000])
def test_a_prompts_flops_count_windows_in_all_but_every_sixth_layer(size: str, num_tokens: int) -> None:
    d, _, layers, full, heads, _, dim = facts(size)
    seen = num_tokens * (num_tokens + 1) // 2
    beyond = max(0, num_tokens - WINDOW)
    seen_in_window = seen - beyond * (beyond + 1) // 2
    pairs = full * seen + (layers - full) * seen_in_window
    multiplied = linear_params(size) + norm_params(size)
    expected = 2 * num_tokens * multiplied + 2 * VOCAB * d + 4 * heads * dim * pairs
    assert prefill_work(shape_of(size), num_tokens).flops == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_a_cache_holds_every_position_of_every_layer_and_a_step_reads_windows(size: str) -> None:
    _, _, layers, full, _, kv, dim = facts(size)
    shape, one = shape_of(size), 2 * kv * dim * 2
    assert kv_bytes_per_token(shape) == layers * one
    assert kv_bytes(shape, 8192, 2, 16) == 8192 * layers * one
    read = step_work(shape, [Chunk(1, 8191)]).kv_bytes
    assert read == (full * 8192 + (layers - full) * WINDOW) * one


@pytest.mark.parametrize("size", SIZES)
def test_a_token_takes_as_long_as_its_bytes(size: str) -> None:
    _, _, layers, full, _, kv, dim = facts(size)
    shape, machine = shape_of(size), load_machine("h100")
    cache = (full * 2048 + (layers - full) * WINDOW) * 2 * kv * dim * 2
    time = decode_time(shape, machine, 1, 2048)
    assert time.binds == "bandwidth"
    assert time.seconds == pytest.approx((2 * shape.num_params + cache) / machine.bandwidth)


@pytest.mark.parametrize("size", SIZES)
def test_an_int4_step_reads_eighteen_bytes_for_32_weights_and_an_int8_head(size: str) -> None:
    """Held besides: the same table in 16 bits, which a step reads by the row."""
    d = facts(size)[0]
    held = native_weight_bytes(Checkpoint(Path(), config_of(size)).decoder, "int4", "float32", 4096)
    assert held.linears == linear_params(size) * 18 // 32
    assert held.head == VOCAB * d + 4 * VOCAB
    assert held.embedding == 2 * VOCAB * d


@pytest.mark.parametrize("size", SIZES)
def test_an_image_is_one_tile_of_256_tokens_whatever_its_size(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(size)))
    tower = load_model(str(tmp_path)).tower
    assert tower is not None
    flops = tower.flops(tower.geometry.squares(1))
    block = 4 * (1152**2 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    patches = 27 * block + 1152 * (3 * 14**2 + 1) + 2 * 1152
    attention = 4 * 27 * 4096**2 * 1152
    projection = 2 * 256 * 1152 * facts(size)[0]
    assert flops == pytest.approx(2 * 4096 * patches + attention + projection, rel=1e-3)
    assert round(flops / 1e12, 1) == 5.5
    plan = json.loads(call("image", "--model", str(tmp_path), "--tiles", "1", "--json"))
    assert (plan["patch_tokens"], plan["visual_tokens"]) == (4096, 256)


@pytest.mark.parametrize("size", SIZES)
def test_the_planner_shows_the_gap_that_a_whole_span_makes(size: str, tmp_path: Path) -> None:
    """No chunk ends inside a span, so a step beside others' decodes takes its 256 tokens at once."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(size)))
    arguments = ("image", "--model", str(tmp_path), "--machine", "rtx4090", "--tiles", "1")
    plan, machine = json.loads(call(*arguments, "--json")), load_machine("rtx4090")
    context = plan["prompt_tokens"]
    work = step_work(
        shape_of(size).lumped(), [Chunk(256, context - 256, 0), Chunk(1, context)], Precision(2, 4)
    )
    floor = max(work.flops / machine.rate(), work.num_bytes / machine.bandwidth)
    assert plan["span_tokens"] == 256 and plan["span_step_s"] == pytest.approx(floor)
    assert plan["span_step_s"] > 2 * plan["decode_step_s"]
    assert "256 tokens in one step" in call(*arguments)


def test_where_prompts_may_be_cut_anywhere_no_gap_is_shown() -> None:
    plan = json.loads(call("image", "--model", "default", "--json"))
    assert plan["span_tokens"] == 0 and "in one step" not in call("image", "--model", "default")
