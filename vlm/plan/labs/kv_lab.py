"""Lab 1: what the cache of a context costs, and how many of them a device holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm.cost import (
    Bound,
    DecoderShape,
    Machine,
    Parallel,
    Precision,
    decode_time,
    inference_ledger,
    kv_bytes,
    kv_bytes_per_token,
    max_batch,
    weight_bytes,
)
from vlm.plan.render import binary, count, gigabytes, pairs, percent


@dataclass(frozen=True, slots=True)
class KvPlan:
    context: int
    sequences: int
    kv_per_token_bytes: float
    kv_per_sequence_bytes: int
    kv_total_bytes: int
    weight_bytes: int
    device_bytes: int
    device_used: float  # share; above 1 it doesn't fit
    max_concurrency: int
    kv_read_per_step_bytes: float
    kv_share_of_step: float
    binds: Bound


def plan_kv(
    shape: DecoderShape,
    machine: Machine,
    context: int,
    sequences: int = 1,
    precision: Precision | None = None,
    block_size: int = 1,
) -> KvPlan:
    """Capacity accounting on one device, without activations and workspace."""
    precision = precision or Precision()
    ledger = inference_ledger(shape, sequences, context, precision, block_size=block_size)
    used = (ledger.weights + ledger.kv) / machine.memory_bytes
    roomy = replace(machine, workspace_bytes=0)
    step = decode_time(shape, machine, sequences, context, precision)
    read = sequences * kv_bytes(shape, context, precision.kv_bytes)
    return KvPlan(
        context=context,
        sequences=sequences,
        kv_per_token_bytes=kv_bytes_per_token(shape, precision.kv_bytes),
        kv_per_sequence_bytes=kv_bytes(shape, context, precision.kv_bytes, block_size),
        kv_total_bytes=ledger.kv,
        weight_bytes=ledger.weights,
        device_bytes=machine.memory_bytes,
        device_used=used,
        max_concurrency=max_batch(shape, roomy, context, precision, Parallel(), block_size),
        kv_read_per_step_bytes=read,
        kv_share_of_step=read / (read + weight_bytes(shape, precision.weight_bytes)),
        binds="capacity" if used > 1 else step.binds,
    )


def capacity_curve(
    shape: DecoderShape,
    machine: Machine,
    contexts: list[int],
    precision: Precision | None = None,
) -> list[int]:
    """Resident sequences at each context."""
    roomy = replace(machine, workspace_bytes=0)
    return [max_batch(shape, roomy, context, precision) for context in contexts]


def render_kv(plan: KvPlan, title: str) -> str:
    rows = [
        ("context", f"{plan.context:,} tokens x {plan.sequences:,} sequences"),
        ("KV per token", binary(plan.kv_per_token_bytes)),
        ("KV per sequence", gigabytes(plan.kv_per_sequence_bytes)),
        ("KV total", gigabytes(plan.kv_total_bytes)),
        ("weights", gigabytes(plan.weight_bytes)),
        ("device used", f"{percent(plan.device_used)} of {gigabytes(plan.device_bytes)}"),
        ("max concurrency", count(plan.max_concurrency)),
        (
            "KV read / decode step",
            f"{gigabytes(plan.kv_read_per_step_bytes)} ({percent(plan.kv_share_of_step)} of the bytes)",
        ),
        ("binds", plan.binds if plan.binds != "capacity" else "capacity: it doesn't fit"),
    ]
    return pairs(
        title, rows, ["capacity only: no activations and no fragmentation; engines reserve a few GB more"]
    )
