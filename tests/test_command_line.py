"""The command line as a stranger meets it: help, closed pipes, full disks, names in errors."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlm.bench import BENCHMARKS, PARTS
from vlm.cli.errors import BAD_INPUT, FAILURE, PARTIAL, run
from vlm.cli.main import app
from vlm.config import DEFAULT_MODEL

SAMPLE = Path(__file__).resolve().parent.parent / "vlm" / "samples" / "shapes.png"
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(list(arguments), standalone_mode=False, prog_name="vlm"))
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.mark.parametrize("group", [(), ("plan",), ("worker",)])
def test_a_group_without_a_command_shows_its_help_line_by_line(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, shown = call(capsys, *group)
    assert code == BAD_INPUT and out == ""
    assert shown.startswith("Usage: ") and shown.count("\n") > 10
    assert "xample" in shown and "..." not in shown.partition("Commands:")[2]
    assert (0, shown, "") == call(capsys, *group, "--help")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("ask",), "ask"),
        (("plan", "kv", "--context", "x"), "plan kv"),
        (("nonsense",), ""),
        (("caption",), "caption"),
    ],
)
def test_wrong_usage_says_where_the_right_one_stands(
    arguments: tuple[str, ...], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = call(capsys, *arguments)
    assert code == BAD_INPUT and errors.count("\n") == 1
    assert errors.endswith(f"(see: {' '.join(('vlm', command)).strip()} --help)\n")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"vlm-serve {version('vlm-serve')}\n", "")


@pytest.mark.parametrize("stdout", ["gone", "full", "closed"])
def test_output_that_nobody_takes_ends_without_a_traceback(stdout: str) -> None:
    """Buffered, as for a user: the error comes as the command ends."""
    target = 'exec >&-; exec "$@"' if stdout == "closed" else 'exec "$@" >/dev/full'
    command = [sys.executable, "-m", "vlm.cli.main", "tokens", str(SAMPLE)]
    if stdout == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=BUFFERED)
        os.close(writer)
    else:
        done = subprocess.run(
            ["sh", "-c", target, "sh", *command], capture_output=True, text=True, env=BUFFERED
        )
    wanted = {
        "gone": (FAILURE, ""),
        "full": (FAILURE, "vlm: No space left on device\n"),
        "closed": (0, ""),
    }
    assert (done.returncode, done.stderr) == wanted[stdout]


def test_images_that_cannot_be_read_do_not_hide_the_others_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, absent = tmp_path / "notes.jpg", tmp_path / "absent.png"
    text.write_text("no image")
    code, out, errors = call(capsys, "tokens", str(text), str(SAMPLE), str(absent))
    assert code == PARTIAL and SAMPLE.name in out and text.name not in out
    first, second, last = errors.splitlines()
    assert str(text) in first and str(absent) in second and "2 of 3" in last
    code, out, errors = call(capsys, "tokens", str(text))
    assert (code, out) == (BAD_INPUT, "") and errors.count("\n") == 1


def test_a_pdf_is_sent_to_the_command_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its bytes, whatever its name."""
    for path in (tmp_path / "page.pdf", tmp_path / "scan"):
        path.write_bytes(b"%PDF-1.4")
        for command in (("tokens", str(path)), ("plan", "image", str(path))):
            code, _, errors = call(capsys, *command)
            assert code == BAD_INPUT and str(path) in errors and f"vlm caption {path}" in errors


def test_a_url_where_a_file_is_wanted_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    url = "https://example.org/a.png"
    for command in (("ask", url, "What?"), ("tokens", url), ("plan", "image", url)):
        code, _, errors = call(capsys, *command)
        assert code == BAD_INPUT and errors.count("\n") == 1 and f"{url} is a URL" in errors


@pytest.mark.parametrize(
    "lacks", ["everything", "config.json", "processor_config.json", "model.safetensors", "tokenizer.json"]
)
def test_what_is_wrong_with_a_model_is_told_with_its_folder(
    lacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in Path(DEFAULT_MODEL).iterdir() if lacks != "everything" else ():
        if path.name != lacks:
            (folder / path.name).symlink_to(path)
    asking, counting = ("ask", str(SAMPLE), "What?"), ("tokens", str(SAMPLE))
    for command in (asking,) if lacks == "model.safetensors" else (asking, counting):
        code, _, errors = call(capsys, *command, "--model", str(folder))
        assert code == BAD_INPUT and errors.count("\n") == 1 and f"{folder}: " in errors


def test_of_several_images_the_damaged_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.jpg"
    Image.effect_noise((300, 300), 50).convert("RGB").save(path, "JPEG")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, _, errors = call(capsys, "ask", str(SAMPLE), str(path), "What is it?")
    assert code == BAD_INPUT and errors.startswith(f"vlm: {path}: ") and errors.count("\n") == 1


def given_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> None:
    """None: a terminal."""
    stdin = io.TextIOWrapper(io.BytesIO(data or b""))
    monkeypatch.setattr(stdin, "isatty", lambda: data is None)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_an_image_may_come_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("tokens",), ("plan", "image", "--model", "default")):
        given_stdin(monkeypatch, SAMPLE.read_bytes())
        piped = call(capsys, *command, "-", "--json")
        assert piped[0] == 0, piped
        assert piped[1].replace('"stdin"', '"-"') == call(capsys, *command, str(SAMPLE), "--json")[1].replace(
            f'"{SAMPLE}"', '"-"'
        )
    given_stdin(monkeypatch, SAMPLE.read_bytes())
    code, out, _ = call(capsys, "ask", "-", "How many shapes are there?")
    assert (code, out) == (0, "3\n")


def test_a_stdin_that_holds_no_image_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {b"": "stdin: The image is empty.", b"junk": "stdin: The image format", None: "pipe an image"}
    for data, text in told.items():
        for command in (("tokens", "-"), ("ask", "-", "What?"), ("plan", "image", "-")):
            given_stdin(monkeypatch, data)
            code, _, errors = call(capsys, *command)
            assert code == BAD_INPUT and text in errors and errors.count("\n") == 1
    for command in (("tokens", "-", "-"), ("ask", "-", "-", "What?")):
        code, _, errors = call(capsys, *command)
        assert code == BAD_INPUT and "read once" in errors
    code, _, errors = call(capsys, "caption", "-", "-o", "out.jsonl")
    assert code == BAD_INPUT and "stdin" in errors


def test_a_pdf_and_what_only_has_its_name_are_told_apart_by_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, html = tmp_path / "scan", tmp_path / "page.pdf"
    page.write_bytes(b"\n%PDF-1.4")
    html.write_bytes(b"<!DOCTYPE html>")
    for command in (("tokens", str(page)), ("plan", "image", str(page))):
        assert f"vlm caption {page}" in call(capsys, *command)[2]
    for command in (("ask", str(html), "What?"), ("tokens", str(html)), ("plan", "image", str(html))):
        errors = call(capsys, *command)[2]
        assert "vlm caption" not in errors and "is not a PDF" in errors


def test_a_file_that_may_not_be_read_is_told_alike_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shut.png"
    path.write_bytes(SAMPLE.read_bytes())

    real = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)  # what the command line library asks
    for command in (("ask", str(path), "What?"), ("tokens", str(path)), ("plan", "image", str(path))):
        assert call(capsys, *command)[2] == f"vlm: can't read {path}: Permission denied\n"


def test_every_benchmark_is_listed_and_has_a_module_that_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = call(capsys, "bench", "--help")
    for name, about in BENCHMARKS.items():
        assert f"{name}" in shown and about in shown
        assert callable(importlib.import_module(f"vlm.bench.{name}_bench").run)
    for name, parts in PARTS.items():
        code, _, errors = call(capsys, "bench", name, "--part", "nothing")
        assert code == BAD_INPUT and all(part in errors for part in parts)


ENTRY = [sys.executable, "-m", "vlm.cli.entry"]


def test_ctrl_c_while_modules_load_shows_none_of_them(tmp_path: Path) -> None:
    """`typer` is one that is loaded for every command; here it waits for the signal."""
    (tmp_path / "typer.py").write_text("import sys, time; print('loading', flush=True); time.sleep(60)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [*ENTRY, "--help"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"loading\n"
        child.send_signal(signal.SIGINT)
        assert (child.wait(60), child.stderr.read()) == (-signal.SIGINT, b"")


def test_ctrl_c_in_a_command_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(
        [*ENTRY, "tokens", str(tmp_path / "pipe")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stderr is not None
        writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns when the command reads
        child.send_signal(signal.SIGINT)
        assert (child.wait(60), child.stderr.read()) == (130, b"vlm: interrupted\n")
        os.close(writer)


def test_a_closed_stderr_is_neither_stdout_nor_a_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(SAMPLE.read_bytes())
    script = 'exec 2>&-; exec "$@"'
    command = [*ENTRY, "tokens", str(tmp_path / "a.png"), str(tmp_path / "absent.png"), "--json"]
    done = subprocess.run(["sh", "-c", script, "sh", *command], stdout=subprocess.PIPE, text=True)
    assert done.returncode == PARTIAL
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["images"][0]["path"].endswith("a.png")
    opened = "import os; from vlm.cli.entry import _open_standard_files as o; o(); print(os.open('/', 0))"
    shown = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", opened], stdout=subprocess.PIPE, text=True
    )
    assert int(shown.stdout) > 2
