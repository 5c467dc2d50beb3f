"""Charts of plans as PNG files. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm.cost import CostError, Machine
from vlm.extras import require
from vlm.plan.labs.batch_lab import BatchPlan
from vlm.plan.labs.image_lab import ImagePlan
from vlm.plan.labs.kv_lab import KvPlan
from vlm.plan.labs.serve_lab import ServePlan
from vlm.plan.simulation.fleet import FleetPlan
from vlm.plan.simulation.schedule import Simulation

CONTEXTS = [1 << power for power in range(9, 18)]
_COLORS = {"prefill": "#3b6fb5", "decode": "#5aa469", "idle": "#d9b3b3"}


def check_plot(path: Path) -> None:
    """Raises CostError for a file that no chart can be, ConfigError without matplotlib."""
    if path.suffix.lower() != ".png":
        raise CostError("--plot takes a file name that ends in .png")
    require("plot", "--plot", "matplotlib")


@contextmanager
def figure(path: Path, title: str, panels: int = 1) -> Iterator[list[Any]]:
    """Axes to draw on; the file is written at the end. Raises CostError if it can't be, ConfigError
    without matplotlib."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.4 * panels, 4.8), layout="constrained")
    canvas = FigureCanvasAgg(drawing)
    axes = [drawing.add_subplot(1, panels, index + 1) for index in range(panels)]
    drawing.suptitle(title)
    yield axes
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise CostError(f"can't write {path}: {error.strerror}") from None


def plot_capacity(path: Path, title: str, plan: KvPlan, curve: Sequence[int]) -> None:
    """Resident sequences against context."""
    with figure(path, title) as (axis,):
        axis.plot(CONTEXTS, [max(value, 0.1) for value in curve], marker="o", color=_COLORS["prefill"])
        axis.axvline(plan.context, linestyle="--", color="grey")
        axis.axhline(plan.sequences, linestyle=":", color="grey")
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="sequences that fit")
        axis.set_xscale("log", base=2)


def plot_roofline(path: Path, title: str, plan: ServePlan, machine: Machine, prefill: float) -> None:
    """Where prefill and decode lie under the roof; `prefill` is its intensity in FLOP/byte."""
    with figure(path, title) as (axis,):
        intensities = [2.0**power for power in range(-1, 15)]
        axis.plot(
            intensities,
            [min(machine.peak_flops, i * machine.bandwidth) / 1e12 for i in intensities],
            color="black",
        )
        axis.axvline(plan.ridge, linestyle="--", color="grey", label=f"ridge {plan.ridge:.0f}")
        for name, intensity, color in (
            ("decode", plan.decode_intensity, _COLORS["decode"]),
            ("prefill", prefill, _COLORS["prefill"]),
        ):
            roof = min(machine.peak_flops, intensity * machine.bandwidth) / 1e12
            axis.plot([intensity], [roof], "o", color=color, label=f"{name} {intensity:.3g}")
        axis.set(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel="TFLOP/s")
        axis.legend()


def plot_batching(path: Path, title: str, plan: BatchPlan) -> None:
    """Rates of all and of one against batch, with B_cross, B* and B_max."""
    batches = [point.batch for point in plan.curve]
    with figure(path, title, panels=2) as (total, user):
        total.plot(batches, [point.tokens_per_s for point in plan.curve], marker="o")
        total.axhline(plan.throughput_ceiling, linestyle=":", color="grey", label="ceiling")
        total.set(ylabel="tok/s, all sequences")
        user.plot(batches, [point.user_tokens_per_s for point in plan.curve], marker="o", color="#b5533b")
        user.set(ylabel="tok/s per user")
        for axis in (total, user):
            for name, batch in (
                ("B_cross", plan.batch_cross),
                ("B*", plan.batch_at_ridge),
                ("B_max", plan.max_batch),
            ):
                if batch >= 1:
                    axis.axvline(batch, linestyle="--", linewidth=0.8, color="grey")
                    axis.text(batch, axis.get_ylim()[1], name, ha="center", va="bottom", fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set(xlabel="batch")
        total.legend()


def plot_image(path: Path, title: str, plan: ImagePlan) -> None:
    """The first token's time by stage: with the image, on the next question, and without one."""
    with figure(path, title) as (axis,):
        names = ["with the image", "next question", "text only"]
        left = [0.0, 0.0, 0.0]
        stages = [
            ("preprocess", [plan.preprocess_s, 0.0, 0.0], "#c9a24b"),
            ("vision tower", [plan.encode_s, 0.0, 0.0], _COLORS["decode"]),
            ("prefill", [plan.prefill_s, plan.warm_ttft_s, plan.text_ttft_s], _COLORS["prefill"]),
        ]
        for name, seconds, color in stages:
            widths = [value * 1e3 for value in seconds]
            axis.barh(names, widths, left=left, color=color, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set(xlabel="TTFT, ms")
        axis.legend()


def plot_timeline(path: Path, title: str, sims: Sequence[Simulation]) -> None:
    """What every slot did, one panel per policy."""
    with figure(path, title, panels=len(sims)) as axes:
        for axis, sim in zip(axes, sims, strict=True):
            for kind, color in _COLORS.items():
                bars = {"facecolors": color, "label": kind, "hatch": "//" if kind == "idle" else None}
                for slot in sorted({span.slot for span in sim.spans if span.kind == kind}):
                    spans = [span for span in sim.spans if (span.slot, span.kind) == (slot, kind)]
                    ranges = [(span.start_s, span.end_s - span.start_s) for span in spans]
                    axis.broken_barh(ranges, (slot - 0.4, 0.8), **bars)
                    bars["label"] = "_nolegend_"
            axis.set(title=sim.rules.policy, xlabel="s", ylabel="slot")
            axis.invert_yaxis()
        axes[0].legend(loc="lower right")


def plot_fleet(path: Path, title: str, plans: Sequence[tuple[float, FleetPlan]]) -> None:
    """Replicas against load, with affinity and scattered."""
    with figure(path, title) as (axis,):
        rates = [rate for rate, _ in plans]
        axis.plot(rates, [plan.affinity.replica.servers for _, plan in plans], marker="o", label="affinity")
        axis.plot(rates, [plan.scattered.replica.servers for _, plan in plans], marker="o", label="scattered")
        axis.plot(rates, [plan.encode.servers for _, plan in plans], marker=".", label="encoders")
        axis.plot(
            rates, [plan.preprocess.servers for _, plan in plans], marker=".", label="preprocess workers"
        )
        axis.set(xscale="log", yscale="log", xlabel="questions/s", ylabel="servers")
        axis.legend()
