"""`vlm plan`: tables, one JSON line, charts, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from llm.cost import kv_bytes
from vlm.cli.tokens import image_cost
from vlm.plan.catalog import load_model
from vlm.plan.cli import app
from vlm.spec import ModelSpec

COMMANDS = ("kv", "serve", "batch", "image", "schedule", "fleet")
FIELDS = {
    "kv": ("kv_per_token_bytes", "kv_per_sequence_bytes", "kv_total_bytes", "weight_bytes", "device_used",
           "max_concurrency", "kv_read_per_step_bytes", "binds"),
    "serve": ("fits", "ttft_s", "tpot_s", "e2e_s", "output_tokens_per_s", "user_tokens_per_s",
              "kv_share_of_step", "decode_intensity", "kv_copies", "goodput_rps", "binds"),
    "batch": ("batch_at_ridge", "batch_cross", "max_batch", "intensity_at_max", "intensity_ceiling",
              "throughput_ceiling", "curve", "binds"),
    "image": ("patch_tokens", "visual_tokens", "prompt_tokens", "ttft_s", "vision_share",
              "kv_per_request_bytes", "conversations", "visual_over_text", "binds"),
    "schedule": ("reports",),
    "fleet": ("preprocess", "encode", "affinity", "scattered", "replicas_lost", "in_flight", "binds"),
}  # fmt: skip


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_says_what_binds(command: str) -> None:
    assert "binds" in call(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_on_the_last_line(command: str) -> None:
    document = json.loads(call(command, "--json").strip().splitlines()[-1])
    assert set(FIELDS[command]) <= set(document) and {"model", "machine"} <= set(document)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    text = call(command, "--help")
    assert f"Example: vlm plan {command}" in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_chart_is_a_png(command: str, tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    call(command, "--plot", str(file))
    with Image.open(file) as chart:
        assert chart.format == "PNG" and chart.width > 400 and chart.convert("L").getextrema()[0] < 128


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kv", "--model", "nobody"), "nobody is not a preset"),
        (("kv", "--machine", "abacus"), "abacus is not an accelerator"),
        (("kv", "--kv-bits", "5"), "32, 16, 8 or 4"),
        (("kv", "--context", "0"), "at least 1"),
        (("kv", "--plot", "chart.pdf"), ".png"),
        (("serve", "--tensor", "64"), "query heads"),
        (("serve", "--cached-tokens", "5000"), "must be uncached"),
        (("image", "absent.jpg"), "can't read"),
        (("image", "--model", "llama-3-8b"), "no vision tower"),
        (("image", "--pooling", "3"), "square"),
        (("schedule", "--policy", "magic"), "not a policy"),
        (("schedule", "--rate", "1", "--prompt", "zipf:3"), "lengths are"),
        (("fleet", "--rate", "0"), "above 0"),
        (("fleet", "--slo-ttft-ms", "0.001"), "TTFT limit"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vlm.cli.errors import run

    with pytest.raises(SystemExit) as exit_info:
        run(lambda: app(list(arguments), standalone_mode=False))
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert words in captured.err and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert captured.out == ""


def test_images_are_planned_from_their_headers(tmp_path: Path, make_image: Callable[..., bytes]) -> None:
    file = tmp_path / "photo.jpg"
    whole = make_image(900, 300)
    file.write_bytes(whole[: whole.index(b"\xff\xda") + 16])  # ends where the pixels begin
    document = json.loads(call("image", str(file), "--model", "default", "--json"))
    (one,) = document["per_image"]
    assert (one["width"], one["height"]) == (900, 300)
    assert document["visual_tokens"] == one["visual_tokens"] == 16 * one["tiles"]
    assert document["prompt_tokens"] > document["visual_tokens"] + document["text_tokens"]  # markers
    shape = load_model("default").decoder
    assert document["kv_per_request_bytes"] == kv_bytes(shape, document["prompt_tokens"], 4, 16)


@pytest.mark.parametrize(("width", "height"), [(900, 300), (64, 64), (1200, 1600)])
def test_an_image_costs_what_vlm_tokens_says(
    tmp_path: Path, make_image: Callable[..., bytes], width: int, height: int
) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(make_image(width, height))
    (planned,) = json.loads(call("image", str(file), "--model", "default", "--json"))["per_image"]
    told = image_cost(ModelSpec.load("default"), file.read_bytes(), "auto")
    assert (planned["kv_bytes"], planned["prompt_tokens"]) == (told["kv_bytes"], told["prompt_tokens"])


@pytest.fixture
def make_image() -> Callable[..., bytes]:
    import io

    def make(width: int, height: int, orientation: int = 1) -> bytes:
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", (width, height), "white").save(buffer, "JPEG", exif=exif)
        return buffer.getvalue()

    return make


def test_a_rotated_photo_is_planned_upright(tmp_path: Path, make_image: Callable[..., bytes]) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(make_image(900, 300, orientation=6))
    (one,) = json.loads(call("image", str(file), "--model", "smolvlm-256m", "--json"))["per_image"]
    assert (one["width"], one["height"]) == (300, 900) and one["rows"] > one["cols"]


def test_a_broken_image_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vlm.cli.errors import run

    file = tmp_path / "photo.jpg"
    file.write_bytes(b"not an image")
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: app(["image", str(file)], standalone_mode=False))
    assert exit_info.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from vlm.plan.cli import app\n"
        "for command in ('kv', 'serve', 'batch', 'image', 'schedule', 'fleet'):\n"
        "    app([command, '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
