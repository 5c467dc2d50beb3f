"""The set-up asks for what is missing and keeps what is there."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts_of import ROOT, load_script

system = load_script("scripts/setup_system.py")
setup = load_script("scripts/setup_env.py")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(system.subprocess, "run", run)
    monkeypatch.setattr(system.shutil, "which", lambda name: f"/usr/bin/{name}")
    return commands


def test_nothing_is_asked_of_apt_where_everything_is_there(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "WANTED", dict.fromkeys(system.WANTED, lambda: True))
    system.main()
    assert asked == []


def test_only_what_is_missing_is_asked_of_apt(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ["libtiff-dev", "redis-server"]
    monkeypatch.setattr(
        system, "WANTED", {name: lambda name=name: name not in missing for name in system.WANTED}
    )
    system.main()
    *_, install = asked
    assert [word for word in install if word in system.WANTED] == missing


def test_each_package_is_looked_for_by_what_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with nothing all are missing, with their files none is."""
    monkeypatch.setattr(system, "INCLUDES", (str(tmp_path / "include"),))
    monkeypatch.setattr(system, "FONTS", str(tmp_path / "fonts"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(system.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    assert set(system.WANTED) - set(system.missing()) <= {"python3-venv"}
    headers = ("stdio.h", "jpeglib.h", "zlib.h", "webp/decode.h", "tiff.h", "ft2build.h", "Python.h")
    for name in (
        *(f"bin/{program}" for program in ("gcc", "c++", "redis-server", "chromium")),
        *(f"include/{header}" for header in headers),
        "fonts/truetype/dejavu/DejaVuSans-Bold.ttf",
        "fonts/truetype/wqy/wqy-microhei.ttc",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    assert system.missing() == []


def test_a_failed_install_names_what_is_missing(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "WANTED", {"redis-server": lambda: False})
    monkeypatch.setattr(
        system.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 100)
    )
    with pytest.raises(SystemExit, match="redis-server"):
        system.main()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pyproject.toml", "constraints.txt", setup.SHIM, setup.TIFF_SCRIPT, "scripts/setup_env.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    for name in ("VLM_PIL", "VLM_TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_environment_is_kept_where_only_packages_change(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of, packages = setup.fingerprints()
    edit(tree / "pyproject.toml", "line-length = 110", "line-length = 111")
    assert setup.fingerprints() == (made_of, packages)
    edit(tree / "pyproject.toml", '"numpy>=2.0"', '"numpy>=2.1"')
    kept, other = setup.fingerprints()
    assert kept == made_of and other != packages
    edit(tree / "constraints.txt", "rich==", "rich==1")
    assert setup.fingerprints()[0] == made_of and setup.fingerprints()[1] != other
    for name, value in (("VLM_PIL", "pillow"), ("VLM_TORCH_INDEX", "https://example.com/cpu")):
        monkeypatch.setenv(name, value)
        assert setup.fingerprints()[0] != made_of
        monkeypatch.delenv(name)


def test_a_set_up_with_the_same_inputs_makes_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again with other packages: they are installed into the environment that is there."""
    done: list[str] = []
    target = tree / "env"
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "python").touch()
    monkeypatch.setattr(setup.sys, "argv", ["setup_env.py", str(target)])
    monkeypatch.setattr(setup, "make", lambda *_: done.append("make"))
    monkeypatch.setattr(setup, "pip", lambda _, *words, **__: done.append(" ".join(words)) and 0)
    setup.main()
    assert done[0] == "make" and any(".[dev]" in words for words in done)
    done.clear()
    setup.main()
    assert not any("make" in words or ".[dev]" in words for words in done)
    edit(tree / "constraints.txt", "rich==", "rich==1")
    setup.main()
    assert "make" not in done and any(".[dev]" in words for words in done)


def fake_wheel(folder: Path, name: str, version: str) -> None:
    """A package of this name, in an index's folder that holds nothing else."""
    (folder / name).mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Dist: not-in-this-index\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},"
        f"{len(text)}\n"
        for path, text in files.items()
    )
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")):
            wheel.writestr(path, text)
    link = f"{name}-{version}-py3-none-any.whl".replace("+", "%2B")
    (folder / name / "index.html").write_text(f'<a href="{link}">{link}</a>')


@pytest.mark.slow
def test_torch_comes_from_the_index_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:])
    for name in ("torch", "torchvision"):
        fake_wheel(tmp_path / "index", name, f"{pins[name]}+cpu")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setenv("VLM_TORCH_INDEX", (tmp_path / "index").as_uri())
    setup.install_torch(python)
    show = [python, "-m", "pip", "list", "--format", "freeze"]
    assert f"torch=={pins['torch']}+cpu" in subprocess.check_output(show, text=True).split()


def test_an_index_without_the_pinned_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLM_TORCH_INDEX", "https://example.com/cpu")
    monkeypatch.setattr(setup, "pip", lambda *_, **__: 1)
    with pytest.raises(SystemExit, match="VLM_TORCH_INDEX=https://"):
        setup.install_torch(Path(sys.executable))


def test_without_the_variable_torch_comes_as_any_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLM_TORCH_INDEX", raising=False)
    monkeypatch.setattr(setup, "pip", lambda *_, **__: pytest.fail("asked"))
    setup.install_torch(Path(sys.executable))
