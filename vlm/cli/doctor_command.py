"""`vlm doctor`: what is installed, what is missing and what it costs, and how fast this machine is."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from llm.backend import native_build
from vlm.arithmetic import fast_arithmetic

if TYPE_CHECKING:
    from llm.cost import Machine

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

    from preprocess.formats.libtiff import is_clean, pillow_in_use

    return {
        "library": "pillow-simd" if ".post" in PIL.__version__ else "Pillow",
        "version": PIL.__version__,
        "jpeg": str(features.version("jpg")),
        "turbo": str(features.check_feature("libjpeg_turbo")),
        "tiff_pillow": pillow_in_use(),
        "compressed_tiffs": "read" if is_clean() else "refused",
    }


def native_library() -> dict[str, str]:
    """The level of the decoder's library, empty where it can't run, and where the library comes from or why
    there is none."""
    if reason := native_build.why_unavailable():
        return {"level": "", "library": reason}
    if found := native_build.shipped():
        level = next(level for level in native_build.levels() if level in found.name)
        return {"level": level, "library": f"shipped for {level}"}
    level = native_build.levels()[0]
    return {"level": level, "library": f"compiled at first use for {level}"}


def gpus() -> list[str]:
    """Name and memory of every CUDA device that torch finds."""
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in found]


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
        "compiler": native_build.compiler() or "",
        "native": native_library(),
        "redis_server": shutil.which("redis-server") or "",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "encoder_dtype": fast_arithmetic(),
        "gpus": gpus(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in native_build.cpu_flags()],
    }


def advice(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["imaging"]["library"] != "pillow-simd":
        lines.append(
            "PIL is Pillow: images resize several times slower than with pillow-simd (make env builds it)"
        )
    if not found["native"]["level"]:
        lines.append(f"{found['native']['library']}; torch takes its place")
    if found["imaging"]["compressed_tiffs"] == "refused":
        lines.append(
            f"compressed TIFFs are refused: PIL {found['imaging']['tiff_pillow']} may show other images' "
            "pixels for damaged ones (packaging/pillow_for_tiff.py installs one that doesn't)"
        )
    if not found["redis_server"]:
        lines.append(
            "no redis-server here: needed only for workers on a broker of this machine, and for tests"
        )
    lines += [
        f"{name} is missing: pip install {name}" for name, v in found["packages"].items() if v == "missing"
    ]
    return lines


def measured(machine: Machine) -> list[tuple[str, str]]:
    """(what, figure with its unit) of a measured machine."""
    s_per_megapixel = machine.preprocess_s_per_megapixel
    return [
        ("memory bandwidth", f"{machine.bandwidth / 1e9:.1f} GB/s"),
        ("cache bandwidth", f"{machine.cache_bandwidth / 1e9:.1f} GB/s"),
        ("prompts", f"{machine.rate() / 1e9:.0f} GFLOP/s"),
        ("decoding", f"{machine.rate(decoding=True) / 1e9:.0f} GFLOP/s"),
        ("vision tower", f"{machine.peak_flops * machine.tower_efficiency / 1e9:.0f} GFLOP/s"),
        ("cost of a step", f"{machine.step_overhead_s * 1e3:.2f} ms, whatever its size"),
        ("decoding images", f"{s_per_megapixel * 1e3:.1f} ms a megapixel"),
        ("cutting tiles", f"{machine.preprocess_s_per_tile * 1e3:.2f} ms a tile"),
        ("source", machine.source),
    ]


def show_doctor(*, quick: bool, as_json: bool) -> None:
    found = installation()
    machine = None
    if not quick:
        from vlm.plan.machine.calibration import measure_machine

        print("measuring memory bandwidth and matrix rate, some 20 seconds ...", file=sys.stderr)
        machine = measure_machine(quick=True)
    if as_json:
        print(json.dumps({**found, "machine": machine and asdict(machine), "advice": advice(found)}))
        return
    print(f"{'python':16} {found['python']}")
    for name, version in found["packages"].items():
        print(f"{name:16} {version}")
    print(f"{'PIL':16} {found['imaging']['library']} {found['imaging']['version']}")
    print(f"{'compiler':16} {found['compiler'] or 'none'}")
    print(f"{'native decoder':16} {found['native']['library']}")
    print(f"{'tower':16} multiplies in {found['encoder_dtype']}")
    print(f"{'redis-server':16} {found['redis_server'] or 'none'}")
    print(f"{'cores':16} {found['cores']} ({', '.join(found['cpu_flags']) or 'no vector extensions known'})")
    print(f"{'GPUs':16} {'; '.join(found['gpus']) or 'none that torch finds'}")
    for name, figure in measured(machine) if machine else ():
        print(f"{name:16} {figure}")
    for line in advice(found):
        print(f"note: {line}")
