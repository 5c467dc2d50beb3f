"""Makes a virtual environment that runs the project and its tests. Running it again is a no-op.

    python3 scripts/setup_env.py .venv

PIL is pillow-simd where it can be built (a compiler and the headers of libjpeg, zlib, libwebp and
libtiff), with a Pillow beside it that reads TIFFs; else Pillow with one notice. VLM_PIL=pillow asks for
Pillow. VLM_TORCH_INDEX names a package index that torch and torchvision come from: one of CPU-only builds
saves gigabytes where no GPU is used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PILLOW_SIMD = "pillow-simd==12.1.1.post0"
SHIM = "packaging/pillow-shim/pyproject.toml"
TIFF_SCRIPT = "packaging/pillow_for_tiff.py"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprints() -> tuple[str, str]:
    """Of what an environment is made of, and of the packages that are installed into it: where only these
    are other ones, the environment is kept. Of pyproject.toml only what it asks for counts."""
    import tomllib

    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    variables = [os.environ.get(name, "") for name in ("VLM_PIL", "VLM_TORCH_INDEX")]
    imaging = [(ROOT / name).read_bytes() for name in (SHIM, TIFF_SCRIPT)]
    made_of = _digest(sys.version, variables, PILLOW_SIMD, imaging)
    asked = (file["build-system"], project["dependencies"], project["optional-dependencies"])
    texts = [(ROOT / name).read_bytes() for name in ("constraints.txt", "scripts/setup_env.py")]
    return made_of, _digest(asked, texts)


def avx2_flag() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return " -mavx2" if platform.machine() == "x86_64" and " avx2" in flags else ""


def pip(python: Path, *arguments: str, quiet: bool = True, env: dict[str, str] | None = None) -> int:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if quiet:
        command.insert(4, "-q")
    return subprocess.run(command, cwd=ROOT, env=env).returncode


def install_pil(python: Path) -> None:
    """Puts exactly one PIL into the environment, before anything that depends on `pillow`."""
    if os.environ.get("VLM_PIL") != "pillow":
        print("setup: building pillow-simd (a minute or so, once)", flush=True)
        env = os.environ | {"CC": os.environ.get("CC", "cc") + avx2_flag()}
        built = pip(python, "--no-deps", "--no-binary", "pillow-simd", PILLOW_SIMD, env=env) == 0
        if built and pip(python, "--no-deps", "./packaging/pillow-shim") == 0:
            if subprocess.run([str(python), TIFF_SCRIPT], cwd=ROOT).returncode:
                print("setup: the Pillow that reads TIFFs can't be installed: compressed TIFFs are refused")
            return
        print(
            "setup: pillow-simd can't be built here (it needs a C compiler and the headers of libjpeg, zlib, "
            "libwebp and libtiff); Pillow takes its place, image resizing will be several times slower",
            flush=True,
        )
        subprocess.run(
            [str(python), "-m", "pip", "uninstall", "-q", "-y", "pillow", "pillow-simd"], check=False
        )
    if pip(python, "pillow>=13,<13.1"):
        sys.exit("setup: neither pillow-simd nor Pillow could be installed")


def install_torch(python: Path) -> None:
    """From VLM_TORCH_INDEX, where that is set; what depends on torch then finds it there."""
    index = os.environ.get("VLM_TORCH_INDEX")
    if index and pip(
        python, "--no-deps", "-c", "constraints.txt", "--index-url", index, "torch", "torchvision"
    ):
        sys.exit(f"setup: VLM_TORCH_INDEX={index} lacks the torch or torchvision of constraints.txt")


def make(target: Path, python: Path) -> None:
    """A fresh environment with the packages that others must not bring along."""
    shutil.rmtree(target, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", str(target)]).returncode:
        sys.exit("setup: can't make a virtual environment; on Debian: apt-get install python3-venv")
    if pip(python, "setuptools>=77", "wheel"):
        sys.exit("setup: pip can't reach a package index")
    install_pil(python)
    install_torch(python)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  the one script that an older Python may be given
        sys.exit(f"setup: Python 3.11 or newer is needed, not {platform.python_version()}; set PYTHON=...")
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")
    stamp = target / ".setup-fingerprint"
    python = target.absolute() / "bin" / "python"
    made_of, packages = fingerprints()
    found = stamp.read_text().split() if stamp.exists() and python.exists() else []
    if found == [made_of, packages]:
        print(f"setup: {target} is ready")
    else:
        stamp.unlink(missing_ok=True)
        if found[:1] != [made_of]:
            make(target, python)
        print("setup: installing dependencies (torch is large: a few minutes, once)", flush=True)
        if pip(python, "-c", "constraints.txt", "-e", ".[dev]"):
            sys.exit("setup: installing the dependencies failed; see pip's message above")
        stamp.write_text(f"{made_of} {packages}")
    # A cached environment may have been made for another checkout: point it at this one.
    if pip(python, "--no-deps", "--no-build-isolation", "-e", "."):
        sys.exit("setup: installing the project itself failed")


if __name__ == "__main__":
    main()
