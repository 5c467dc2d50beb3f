"""Installs the Debian packages that the project needs and lacks, where there is apt-get.

    python3 scripts/setup_system.py

What is there may have come from anywhere: each package is looked for by the program or file that it is wanted
for. Packages already there are not asked for, so that apt-get upgrades none of them.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

INCLUDES = ("/usr/include", "/usr/local/include", "/usr/include/*-linux-gnu", "/usr/include/freetype2")
FONTS = "/usr/share/fonts"


def program(*names: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) for name in names)


def header(name: str) -> Callable[[], bool]:
    return lambda: any(glob.glob(f"{folder}/{name}") for folder in INCLUDES)


def python_header() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def can_make_environments() -> bool:
    return all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))


# Package -> is what it is wanted for there?
WANTED: dict[str, Callable[[], bool]] = {
    "gcc": program("cc", "gcc"),
    "g++": program("g++", "c++", "clang++"),
    "libc6-dev": header("stdio.h"),
    "python3-dev": python_header,
    "python3-venv": can_make_environments,
    "libjpeg-dev": header("jpeglib.h"),
    "zlib1g-dev": header("zlib.h"),
    "libwebp-dev": header("webp/decode.h"),
    "libtiff-dev": header("tiff.h"),
    "libfreetype-dev": header("ft2build.h"),
    "fonts-dejavu-core": lambda: bool(glob.glob(f"{FONTS}/**/DejaVuSans-Bold.ttf", recursive=True)),
    "fonts-wqy-microhei": lambda: bool(glob.glob(f"{FONTS}/**/wqy-microhei*", recursive=True)),
    "redis-server": program("redis-server"),
    "chromium": program("chromium", "chromium-browser", "google-chrome"),
}


def missing() -> list[str]:
    return [package for package, is_there in WANTED.items() if not is_there()]


def main() -> None:
    packages = missing()
    if not packages or shutil.which("apt-get") is None:
        return
    print(f"setup: installing Debian packages: {' '.join(packages)}", flush=True)
    apt = [*([] if os.geteuid() == 0 else ["sudo"]), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-upgrade", *packages]):
        if subprocess.run([*apt, *words], stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"setup: apt-get {words[0]} failed; these packages are missing: {' '.join(packages)}")


if __name__ == "__main__":
    main()
