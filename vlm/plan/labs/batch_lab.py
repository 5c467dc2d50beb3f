"""Lab 3: the three limits of a batch, and where they lie at a context."""

from __future__ import annotations

from dataclasses import dataclass

from llm.cost import (
    Bound,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    batch_at_ridge,
    decode_work,
    max_batch,
    parallel_decode_time,
)
from vlm.plan.labs.roofline import batch_cross, intensity_ceiling, long_context_intensity, throughput_ceiling
from vlm.plan.render import count, duration, grid, pairs, percent


@dataclass(frozen=True, slots=True)
class BatchPoint:
    batch: int
    tpot_s: float
    tokens_per_s: float  # all sequences
    user_tokens_per_s: float
    intensity: float  # FLOP/byte
    binds: Bound


@dataclass(frozen=True, slots=True)
class BatchPlan:
    context: int
    batch_at_ridge: float  # B*
    batch_cross: float  # cache bytes = weight bytes
    max_batch: int  # B_max
    intensity_at_max: float  # FLOP/byte; 0 if nothing fits
    intensity_ceiling: float  # B -> infinity
    long_context_intensity: float  # and N -> infinity: 2g/s
    ceiling_share_of_peak: float
    throughput_ceiling: float  # tokens/s, all sequences
    ridge: float
    curve: tuple[BatchPoint, ...]
    binds: Bound


def plan_batch(
    shape: DecoderShape,
    machine: Machine,
    context: int,
    precision: Precision | None = None,
    tensor: int = 1,
) -> BatchPlan:
    """Roofline bounds: no scheduling, no preemption; workspace as the machine's preset says."""
    precision, parallel = precision or Precision(), Parallel(tensor=tensor)
    most = max_batch(shape, machine, context, precision, parallel)
    ceiling = intensity_ceiling(shape, context, precision)
    ridge = machine.ridge(precision.compute_bits)
    at_max = decode_work(shape, most, context, precision).intensity if most else 0.0
    curve = batching_curve(shape, machine, context, precision, parallel)
    return BatchPlan(
        context=context,
        batch_at_ridge=batch_at_ridge(machine, precision),
        batch_cross=batch_cross(shape, context, precision),
        max_batch=most,
        intensity_at_max=at_max,
        intensity_ceiling=ceiling,
        long_context_intensity=long_context_intensity(shape, precision),
        ceiling_share_of_peak=min(1.0, ceiling / ridge),
        throughput_ceiling=throughput_ceiling(shape, machine, context, precision, tensor),
        ridge=ridge,
        curve=curve,
        binds="capacity" if most < batch_at_ridge(machine, precision) else "compute",
    )


def batching_curve(
    shape: DecoderShape,
    machine: Machine,
    context: int,
    precision: Precision,
    parallel: Parallel,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
) -> tuple[BatchPoint, ...]:
    """Step time and rates per batch; whether it fits is the caller's question."""
    points = []
    for batch in batches:
        step = parallel_decode_time(shape, machine, batch, context, precision, parallel)
        points.append(
            BatchPoint(
                batch=batch,
                tpot_s=step.seconds,
                tokens_per_s=batch / step.seconds,
                user_tokens_per_s=1.0 / step.seconds,
                intensity=decode_work(shape, batch, context, precision).intensity,
                binds=step.binds,
            )
        )
    return tuple(points)


def render_batch(plan: BatchPlan, title: str) -> str:
    rows = [
        ("B* (arithmetic)", count(plan.batch_at_ridge)),
        ("B_cross (KV = weights)", count(plan.batch_cross)),
        ("B_max (capacity)", count(plan.max_batch)),
        ("I at B_max", f"{plan.intensity_at_max:.3g} FLOP/byte (ridge {plan.ridge:.0f})"),
        (
            "I ceiling (B -> inf)",
            f"{plan.intensity_ceiling:.3g} FLOP/byte, {percent(plan.ceiling_share_of_peak)} of peak",
        ),
        ("I ceiling (N -> inf too)", f"{plan.long_context_intensity:.3g} FLOP/byte (2g/s)"),
        ("throughput ceiling", f"{count(plan.throughput_ceiling)} tok/s, all sequences"),
        ("binds", f"{plan.binds} before arithmetic" if plan.binds == "capacity" else plan.binds),
    ]
    header = ("batch", "TPOT", "tok/s", "tok/s per user", "FLOP/byte", "binds")
    table = [
        (
            f"{point.batch}{'' if point.batch <= plan.max_batch else ' (no room)'}",
            duration(point.tpot_s),
            count(point.tokens_per_s),
            count(point.user_tokens_per_s),
            f"{point.intensity:.3g}",
            point.binds,
        )
        for point in plan.curve
    ]
    return pairs(title, rows) + "\n" + grid(header, table)
