"""Options that the planning commands share."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llm.cost import CostError, DecoderShape, Precision, stored_precision
from llm.storage import KvStorage, WeightStorage
from vlm.plan.catalog import PlannedModel
from vlm.plan.render import to_json

Model = Annotated[
    str, typer.Option("--model", help="A preset, 'default', a checkpoint folder or a config.json.")
]
Device = Annotated[
    str, typer.Option("--machine", help="h100, h200, a100, l40s, rtx4090, 'this' or 'cuda' (measured now).")
]
Weights = Annotated[float, typer.Option("--weight-bits", help="Bits per parameter: 32, 16, 8 or 4.")]
Cache = Annotated[float, typer.Option("--kv-bits", help="Bits per cached element: 32, 16, 8 or 4.")]
StoredWeights = Annotated[
    WeightStorage | None,
    typer.Option("--weights", help="As this engine stores them, scales included; overrides --weight-bits."),
]
StoredKv = Annotated[
    KvStorage | None,
    typer.Option("--kv", help="The cache as this engine stores it, scales included; overrides --kv-bits."),
]
Compute = Annotated[int, typer.Option("--compute-bits", help="Width of matrix multiplies: 16 or 8.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Count every parameter, not the articles' rounded sizes.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw a chart.")]


def precision_of(weight_bits: float, kv_bits: float, compute_bits: int = 16) -> Precision:
    for bits in (weight_bits, kv_bits):
        if bits not in (4, 8, 16, 32):
            raise CostError("an element has 32, 16, 8 or 4 bits")
    return Precision(weight_bits / 8, kv_bits / 8, compute_bits)


def stored(
    model: PlannedModel,
    shape: DecoderShape,
    bits: Precision,
    weights: WeightStorage | None,
    kv: KvStorage | None,
) -> Precision:
    """`bits` with the storages that were named in their place: a checkpoint's weights to the byte."""
    if weights is None and kv is None:
        return bits
    found = stored_precision(shape, weights or "float32", kv or "float32", model.config, model.embedding)
    if weights is None:
        return replace(bits, kv_bytes=found.kv_bytes)
    return replace(found, kv_bytes=found.kv_bytes if kv else bits.kv_bytes, compute_bits=bits.compute_bits)


def decoder_of(model: PlannedModel, exact: bool) -> DecoderShape:
    return model.decoder if exact else model.decoder.lumped()


def show(plan: Any, text: str, as_json: bool, **more: Any) -> None:
    """The table, or one JSON object of the same values."""
    print(to_json({**more, **asdict(plan)}) if as_json else text)


def at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise CostError(f"{name} must be at least 1")
    return value
