"""Makes a virtual environment that runs the project and its tests. Running it again is a no-op.

    python3 scripts/setup_env.py .venv

PIL is pillow-simd where it can be built (a compiler and the headers of libjpeg, zlib, libwebp and
libtiff), with a Pillow beside it that reads TIFFs; else Pillow >= 13 with one notice. VLM_PIL=pillow asks for
Pillow.
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
TIFF_SCRIPT = "packaging/pillow_for_tiff.py"
INPUTS = (
    "pyproject.toml",
    "constraints.txt",
    "packaging/pillow-shim/pyproject.toml",
    TIFF_SCRIPT,
    "scripts/setup_env.py",
)


def fingerprint() -> str:
    digest = hashlib.sha256(f"{sys.version} {os.environ.get('VLM_PIL', '')}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


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
    if pip(python, "pillow>=13"):
        sys.exit("setup: neither pillow-simd nor Pillow could be installed")


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")
    stamp = target / ".setup-fingerprint"
    python = target.absolute() / "bin" / "python"
    if stamp.exists() and stamp.read_text() == fingerprint() and python.exists():
        print(f"setup: {target} is ready")
    else:
        shutil.rmtree(target, ignore_errors=True)
        if subprocess.run([sys.executable, "-m", "venv", str(target)]).returncode:
            sys.exit("setup: can't make a virtual environment; on Debian: apt-get install python3-venv")
        if pip(python, "setuptools>=77", "wheel"):
            sys.exit("setup: pip can't reach a package index")
        install_pil(python)
        print("setup: installing dependencies (torch is large: a few minutes, once)", flush=True)
        if pip(python, "-c", "constraints.txt", "-e", ".[dev]"):
            sys.exit("setup: installing the dependencies failed; see pip's message above")
        stamp.write_text(fingerprint())
    # A cached environment may have been made for another checkout: point it at this one.
    if pip(python, "--no-deps", "--no-build-isolation", "-e", "."):
        sys.exit("setup: installing the project itself failed")


if __name__ == "__main__":
    main()
