"""Puts a Pillow beside pillow-simd, as `pillow_for_tiff.PIL` of this environment.

    .venv/bin/python packaging/pillow_for_tiff.py [OPTIONS OF PIP]

Only TIFFs are read with it: preprocess/formats/libtiff.py says why. A wheel brings a libtiff of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PILLOW = "pillow==13.0.0"


def main() -> None:
    target = Path(sysconfig.get_path("purelib")) / "pillow_for_tiff"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *sys.argv[1:]]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(target), PILLOW]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
