"""The library of native.cpp for this machine: shipped with the package, or compiled at first use into the
user's cache. Torch-free.

    python llm/backend/native_build.py      # compiles every level into the package: for images without g++
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = "native*.h"  # beside it
SHIPPED = Path(__file__).with_name("compiled")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
COMPILE_SECONDS = 240

# Microarchitecture levels of the x86-64 psABI, best first, and the features that Linux lists for each beyond
# those of the levels below it.
LEVELS = {
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}),
}


class NativeUnavailable(RuntimeError):
    """This machine can't run the native backend; the text says why in one line."""


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vlm"


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Feature names of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def levels() -> list[str]:
    """Those of LEVELS that this CPU runs, best first."""
    found: list[str] = []
    for level, features in reversed(LEVELS.items()):
        if not features <= cpu_flags():
            break
        found.insert(0, level)
    return found


def compiler() -> str | None:
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def why_unavailable() -> str | None:
    """One line, or None where the native backend can run (compiling may still fail)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the native backend needs an x86-64 CPU"
    if not levels():
        missing = sorted(LEVELS["x86-64-v2"] - cpu_flags())
        return f"the native backend needs a CPU with {', '.join(missing)}"
    if shipped() is None and compiler() is None:
        return "the native backend needs a C++ compiler (g++)"
    return None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The shipped library of the best level that this CPU runs; without one, compiles on first use (some ten
    seconds). Raises NativeUnavailable."""
    if reason := why_unavailable():
        raise NativeUnavailable(reason)
    try:
        return ctypes.CDLL(str(shipped() or _compiled(levels()[0])))
    except OSError:
        raise NativeUnavailable("the native backend's library could not be written or loaded") from None


def shipped() -> Path | None:
    """Of this very source; an edited one is compiled again."""
    found = (_shipped_path(level) for level in levels())
    return next((path for path in found if path.is_file()), None)


def ship() -> list[Path]:
    """Compiles for every level and removes what was there. Raises NativeUnavailable."""
    program = compiler()
    if program is None:
        raise NativeUnavailable("the native backend needs a C++ compiler (g++)")
    shutil.rmtree(SHIPPED, ignore_errors=True)
    SHIPPED.mkdir()
    for level in LEVELS:
        _compile(program, level, _shipped_path(level))
    return sorted(SHIPPED.iterdir())


def _shipped_path(level: str) -> Path:
    return SHIPPED / f"native-{level}-{_digest()}.so"


def _digest(*parts: bytes) -> str:
    """Of the source, the flags and `parts`, in 32 hex digits."""
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob(HEADERS)))]
    key = hashlib.sha256()
    for part in (*sources, " ".join(FLAGS).encode(), *parts):
        key.update(len(part).to_bytes(8, "little") + part)
    return key.hexdigest()[:32]


def _compiled(level: str) -> Path:
    """The library's path in the cache; its name hashes everything that shapes the machine code."""
    program = compiler()
    assert program is not None
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(directory)
    target = directory / f"native-{level}-{_digest(program.encode())}.so"
    if not target.is_file():
        handle, name = tempfile.mkstemp(dir=directory, suffix=".so")
        os.close(handle)
        try:
            _compile(program, level, Path(name))
            os.replace(name, target)  # two processes at once: the last one wins, both are right
        finally:
            Path(name).unlink(missing_ok=True)
    return target


def _check_private(directory: Path) -> None:
    """A library that others could have put there is not loaded."""
    info = directory.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable("the cache directory can be written by others")


def _compile(program: str, level: str, target: Path) -> None:
    try:
        done = subprocess.run(
            [program, *FLAGS, f"-march={level}", str(SOURCE), "-o", str(target)],
            capture_output=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        raise NativeUnavailable("the C++ compiler did not run") from None
    if done.returncode:
        raise NativeUnavailable("the C++ compiler refused the native backend's source")


if __name__ == "__main__":
    try:
        print(*ship(), sep="\n")
    except NativeUnavailable as reason:
        sys.exit(f"vlm: {reason}")
