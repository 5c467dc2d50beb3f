"""`vlm doctor`: what is installed, what is missing and what it costs, and how fast this machine is."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "open_clip_torch",
    "celery",
    "redis",
    "llguidance",
    "numpy",
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def imaging() -> dict[str, str]:
    """Which library really is PIL: pillow-simd carries `.postN` in its version."""
    import PIL
    from PIL import features

    return {
        "library": "pillow-simd" if ".post" in PIL.__version__ else "Pillow",
        "version": PIL.__version__,
        "jpeg": str(features.version("jpg")),
        "turbo": str(features.check_feature("libjpeg_turbo")),
    }


def cpu_flags() -> list[str]:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [flag for flag in CPU_FLAGS if flag in words]


def installation() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return {
        "python": platform.python_version(),
        "packages": versions,
        "imaging": imaging(),
        "compiler": shutil.which("g++") or "",
        "redis_server": shutil.which("redis-server") or "",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_flags": cpu_flags(),
    }


def advice(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["imaging"]["library"] != "pillow-simd":
        lines.append(
            "PIL is Pillow: images resize several times slower than with pillow-simd (make env builds it)"
        )
    if not found["compiler"]:
        lines.append("no g++: the native decoder backend can't be built, torch takes its place")
    if not found["redis_server"]:
        lines.append(
            "no redis-server here: needed only for workers on a broker of this machine, and for tests"
        )
    lines += [
        f"{name} is missing: pip install {name}" for name, v in found["packages"].items() if v == "missing"
    ]
    return lines


def show_doctor(*, quick: bool, as_json: bool) -> None:
    found = installation()
    machine = None
    if not quick:
        from vlm.doctor import measure_machine

        if sys.stderr.isatty():
            print("measuring memory bandwidth and matrix rate ...", file=sys.stderr)
        machine = asdict(measure_machine(quick=True))
    if as_json:
        print(json.dumps({**found, "machine": machine, "advice": advice(found)}))
        return
    print(f"python        {found['python']}")
    for name, version in found["packages"].items():
        print(f"{name:13} {version}")
    print(f"PIL           {found['imaging']['library']} {found['imaging']['version']}")
    print(f"compiler      {found['compiler'] or 'none'}")
    print(f"redis-server  {found['redis_server'] or 'none'}")
    print(f"cores         {found['cores']} ({', '.join(found['cpu_flags']) or 'no vector extensions known'})")
    for name, value in (machine or {}).items():
        print(f"{name:30} {value:.4g}" if isinstance(value, float) else f"{name:30} {value}")
    for line in advice(found):
        print(f"note: {line}")
