"""How weights and KV are stored, as a user asks for it: one line and exit code 2 for what can't be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm.build import build_served_pipeline, check_storage
from vlm.cli.errors import BAD_INPUT, run
from vlm.cli.serve_command import merged
from vlm.config import EngineOptions, ServeConfig, SettingsError
from vlm.settings import from_mapping
from vlm.spec import ModelSpec

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("option", "known"),
    [
        (("--weights", "int3"), "'float32', 'bfloat16', 'float16', 'int8', 'int4'"),
        (("--kv", "int4"), "'float32', 'bfloat16', 'float16', 'int8'"),
    ],
)
@pytest.mark.parametrize("command", [("ask", "x.png", "What?"), ("serve",), ("worker", "generate")])
def test_a_wrong_storage_is_one_line_with_the_known_ones(
    command: tuple[str, ...], option: tuple[str, str], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vlm.cli.main import app

    with pytest.raises(SystemExit) as ended:
        run(lambda: app([*command, *option], standalone_mode=False))
    assert ended.value.code == BAD_INPUT
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and option[1] in error and known in error


def test_ask_answers_from_small_numbers() -> None:
    command = [
        sys.executable,
        "-m",
        "vlm.cli.main",
        "ask",
        "vlm/samples/shapes.png",
        "How many shapes are there?",
    ]
    done = subprocess.run(
        [*command, "--weights", "int8", "--kv", "int8"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vlm.toml"
    file.write_text('[engine]\nweights = "int8"\nkv = "int8"\n')
    options = merged(file, {"weights": "int4"}, {})[1].value
    assert (options.weights, options.kv) == ("int4", "int8")


@pytest.mark.parametrize("values", [{"weights": "int9"}, {"kv": "int4"}, {"dtype": "float8"}])
def test_a_file_with_a_wrong_storage_is_refused_with_the_known_ones(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"must be one of .*float32, bfloat16, float16.*, not '"):
        from_mapping(EngineOptions, values)


def test_what_torch_lacks_is_refused_before_a_process_starts() -> None:
    options = EngineOptions(backend="torch", weights="int8")
    with pytest.raises(SettingsError, match="int8 weights need the native backend"):
        build_served_pipeline(ServeConfig(), options)
    with pytest.raises(SettingsError, match="float16 KV cache needs the native backend"):
        check_storage(EngineOptions(device="cuda", kv="float16"))
    check_storage(EngineOptions(backend="torch", kv="int8"))
    check_storage(EngineOptions(device="cuda", dtype="bfloat16", weights="bfloat16"))


def test_a_machine_without_the_native_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.backend.native_build.compiler", lambda: None)
    with pytest.raises(SettingsError, match=r"int4 weights .*; the native backend needs a C\+\+ compiler"):
        check_storage(EngineOptions(weights="int4"))
    check_storage(EngineOptions())


def test_estimates_count_the_cache_as_it_is_stored() -> None:
    full, small = ModelSpec.load("default"), ModelSpec.load("default", kv=EngineOptions(kv="int8").kv_storage)
    per_head = full.decoder.head_dim
    assert small.kv_bytes(100) * 4 * per_head == full.kv_bytes(100) * (per_head + 4)
    assert EngineOptions(dtype="bfloat16").kv_storage == "bfloat16"
