"""Ratios of bytes and FLOPs: ridge, walls, ceilings. The products themselves are `llm.cost`'s."""

from __future__ import annotations

from llm.cost import (
    DecoderShape,
    Machine,
    Precision,
    decode_work,
    kv_bytes,
    kv_share,
    weight_bytes,
)


def batch_cross(shape: DecoderShape, context: int, precision: Precision | None = None) -> float:
    """B_cross: the batch at which a step's cache bytes overtake its weight bytes."""
    precision = precision or Precision()
    held = weight_bytes(shape, precision.weight_bytes)
    return held / kv_bytes(shape, context, precision.kv_bytes)


def intensity_ceiling(shape: DecoderShape, context: int, precision: Precision | None = None) -> float:
    """FLOP/byte of an endless batch: 2P / M_KV + 2g/s. Only the caches' bytes are left below the line."""
    work = decode_work(shape, 1, context, precision)
    return work.flops / work.kv_bytes


def long_context_intensity(shape: DecoderShape, precision: Precision | None = None) -> float:
    """FLOP/byte of an endless batch at endless context: 2g/s of attention alone."""
    far = 1 << 20
    near, farther = decode_work(shape, 1, far, precision), decode_work(shape, 1, far + 1, precision)
    return (farther.flops - near.flops) / (farther.kv_bytes - near.kv_bytes)


def throughput_ceiling(
    shape: DecoderShape,
    machine: Machine,
    context: int,
    precision: Precision | None = None,
    tensor: int = 1,
) -> float:
    """Tokens/s of all users together that no batch can exceed at this context: bandwidth over one cache."""
    precision = precision or Precision()
    return machine.bandwidth / (kv_bytes(shape, context, precision.kv_bytes) * kv_share(shape, tensor))


def slot_use(output_tokens: list[int]) -> float:
    """Share of a static batch's slot steps that make a token: the batch ends with its longest member."""
    return sum(output_tokens) / (len(output_tokens) * max(output_tokens))


def littles_law(rate_per_s: float, seconds: float) -> float:
    """Requests in the system on average."""
    return rate_per_s * seconds


def end_to_end_seconds(ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    return ttft_s + (output_tokens - 1) * tpot_s
