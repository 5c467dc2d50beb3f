"""Compiles native.cpp once per machine and source, into the user's cache, and loads it. Torch-free."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = "native*.h"  # beside it
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
NEEDED_CPU_FLAGS = frozenset({"avx2", "fma", "f16c"})
COMPILE_SECONDS = 120


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


def compiler() -> str | None:
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def why_unavailable() -> str | None:
    """One line, or None where the native backend can run (compiling may still fail)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the native backend needs an x86-64 CPU"
    if missing := sorted(NEEDED_CPU_FLAGS - cpu_flags()):
        return f"the native backend needs a CPU with {', '.join(missing)}"
    if compiler() is None:
        return "the native backend needs a C++ compiler (g++)"
    return None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Compiles on first use (a few seconds). Raises NativeUnavailable."""
    if reason := why_unavailable():
        raise NativeUnavailable(reason)
    try:
        return ctypes.CDLL(str(_compiled()))
    except OSError:
        raise NativeUnavailable("the native backend's library could not be written or loaded") from None


def _compiled() -> Path:
    """The library's path; its name hashes everything that shapes the machine code."""
    program = compiler()
    assert program is not None
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob(HEADERS)))]
    for part in (*sources, " ".join(FLAGS).encode(), program.encode(), *_machine()):
        key.update(len(part).to_bytes(8, "little") + part)
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(directory)
    target = directory / f"native-{key.hexdigest()[:32]}.so"
    if not target.is_file():
        handle, name = tempfile.mkstemp(dir=directory, suffix=".so")
        os.close(handle)
        try:
            _compile(program, Path(name))
            os.replace(name, target)  # two processes at once: the last one wins, both are right
        finally:
            Path(name).unlink(missing_ok=True)
    return target


def _machine() -> list[bytes]:
    return [platform.machine().encode(), " ".join(sorted(cpu_flags())).encode()]


def _check_private(directory: Path) -> None:
    """A library that others could have put there is not loaded."""
    info = directory.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable("the cache directory can be written by others")


def _compile(program: str, target: Path) -> None:
    try:
        done = subprocess.run(
            [program, *FLAGS, str(SOURCE), "-o", str(target)],
            capture_output=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        raise NativeUnavailable("the C++ compiler did not run") from None
    if done.returncode:
        raise NativeUnavailable("the C++ compiler refused the native backend's source")
