"""`vlm ask`, `vlm tokens` and their errors, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from preprocess.limits import ImageLimits
from vlm.cli.ask import split_arguments
from vlm.cli.errors import CommandError
from vlm.cli.images import read_image

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "vlm" / "samples" / "shapes.png"


def vlm(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vlm.cli.main", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )


def last_json(run: subprocess.CompletedProcess[str]) -> dict:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_each_question_gets_its_answer_usage_and_timings() -> None:
    first, second = last_json(
        vlm("ask", SAMPLE, "-q", "What is in the image?", "-q", "How many shapes are there?", "--json")
    )["answers"]
    assert first["answer"] == "A pink star, a black square and a purple circle."
    assert second["answer"] == "3"
    for answer in (first, second):
        assert answer["finish_reason"] == "stop"
        assert answer["usage"].keys() == {
            "prompt_tokens",
            "image_tokens",
            "cached_tokens",
            "completion_tokens",
        }
        assert answer["timings"].keys() == {
            *("preprocess_ms", "encode_ms", "queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "total_ms")
        }
        assert 0 < answer["timings"]["ttft_ms"] <= answer["timings"]["total_ms"]
    assert first["usage"]["cached_tokens"] == 0 and first["timings"]["encode_ms"] > 0
    assert second["usage"]["cached_tokens"] > 0 and second["timings"]["encode_ms"] == 0


def test_tokens_says_from_the_header_what_ask_then_reports(tmp_path: Path) -> None:
    for size in ((128, 128), (700, 90)):
        path = tmp_path / f"{size[0]}.png"
        Image.new("RGB", size, "white").save(path)
        (row,) = last_json(vlm("tokens", path, "--json"))["images"]
        (answer,) = last_json(vlm("ask", path, "Read the text.", "--max-tokens", "1", "--json"))["answers"]
        assert answer["usage"]["image_tokens"] == row["image_tokens"]


def test_a_source_without_end_is_read_up_to_the_limit() -> None:
    with pytest.raises(CommandError, match="more than 1000 bytes"):
        read_image(Path("/dev/zero"), ImageLimits(max_bytes=1000))


def test_a_question_that_is_no_text_is_refused_and_a_name_that_is_none_is_shown(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.png"
    Path(os.fsdecode(path)).write_bytes(SAMPLE.read_bytes())
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "vlm.cli.main"]
    asked = subprocess.run([*command, "ask", path, b"\xff?"], cwd=ROOT, capture_output=True, env=strict)
    assert asked.returncode == 2 and asked.stderr.startswith(b"vlm: the question is not valid text")
    shown = subprocess.run([*command, "tokens", path, "--json"], cwd=ROOT, capture_output=True, env=strict)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["images"][0]["path"] == os.fsdecode(path)


@pytest.mark.parametrize("wrong", ["missing", "folder", "text", "truncated", "svg", "bomb"])
def test_a_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, wrong: str) -> None:
    """users.md D6, D7, D11."""
    path = tmp_path / "input"
    match wrong:
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("no image at all")
        case "truncated":
            Image.effect_noise((300, 300), 50).convert("RGB").save(path, "JPEG")
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "svg":
            path.write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>')
        case "bomb":
            Image.new("1", (13400, 13400)).save(path, "PNG")
    run = vlm("ask", path, "What is it?")
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert run.stderr.startswith("vlm: ")
    assert "Traceback" not in run.stderr and " at 0x" not in run.stderr
    if wrong == "svg":
        assert all(name in run.stderr for name in ("JPEG", "PNG", "WebP", "GIF", "TIFF", "BMP"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask"],
        ["ask", "a.png"],
        ["ask", "a.png", "?", "--model", "nowhere"],
        ["nonsense"],
        ["ask", "--wrong"],
    ],
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(arguments: list[str]) -> None:
    run = vlm(*arguments)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_the_last_positional_is_the_question_unless_questions_are_named() -> None:
    assert split_arguments(["a.png", "b.png", "What?"], []) == ([Path("a.png"), Path("b.png")], ["What?"])
    assert split_arguments(["a.png", "b.png"], ["Q"]) == ([Path("a.png"), Path("b.png")], ["Q"])
    with pytest.raises(CommandError):
        split_arguments(["What?"], [])
    with pytest.raises(CommandError):
        split_arguments([], ["Q"])


@pytest.mark.parametrize(
    "command", ["ask", "caption", "serve", "plan", "worker", "bench", "train", "doctor", "tokens"]
)
def test_help_has_an_example(command: str) -> None:
    run = vlm(command, "--help")
    assert run.returncode == 0
    assert "xample" in run.stdout and "completion" not in run.stdout


def test_doctor_names_the_imaging_library_in_use() -> None:
    import PIL

    from llm.backend.native_build import LEVELS

    found = last_json(vlm("doctor", "--quick", "--json"))
    assert found["imaging"]["version"] == PIL.__version__
    assert found["imaging"]["library"] == ("pillow-simd" if ".post" in PIL.__version__ else "Pillow")
    assert found["native"]["library"] and found["native"]["level"] in ("", *LEVELS)
