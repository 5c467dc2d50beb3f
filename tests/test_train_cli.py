from pathlib import Path

import typer
from train_fixtures import tiny_network, tiny_template
from typer.testing import CliRunner

from vlm.train.cli import train_command
from vlm.train.export import export
from vlm.train.network import Network

app = typer.Typer()
app.command()(train_command)


def checkpoint(folder: Path) -> Path:
    template = tiny_template(folder / "template")
    export(tiny_network(template), template, folder / "start")
    return folder / "start"


def test_a_run_exports_a_loadable_directory_and_can_be_resumed_from_it(tmp_path: Path) -> None:
    start, out = checkpoint(tmp_path), tmp_path / "run"
    first = CliRunner().invoke(app, ["--from", str(start), "--out", str(out), "--steps", "1"])
    assert first.exit_code == 0, first.output
    assert "exported the best checkpoint" in first.output
    assert Network.load(out / "export").shape == Network.load(start).shape
    again = CliRunner().invoke(
        app, ["--from", str(out / "export"), "--out", str(out), "--steps", "2", "--resume"]
    )
    assert again.exit_code == 0, again.output
    assert (out / "log.jsonl").read_text().count("\n") == 2


def test_unknown_stage_and_missing_checkpoint_are_named(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(app, ["--out", str(tmp_path), "--stage", "sleep"])
    assert unknown.exit_code == 2
    assert "join, decoder, finish" in unknown.output
    missing = CliRunner().invoke(
        app, ["--from", str(checkpoint(tmp_path)), "--out", str(tmp_path / "r"), "--resume"]
    )
    assert missing.exit_code == 2
    assert "no such checkpoint" in missing.output
