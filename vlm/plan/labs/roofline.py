"""Ratios of bytes and FLOPs: ridge, walls, ceilings. The products themselves are `llm.cost`'s."""

from __future__ import annotations

from llm.cost import (
    DecoderShape,
    Machine,
    Precision,
    decode_time,
    decode_work,
    kv_bytes,
    kv_bytes_per_token,
    kv_share,
    weight_bytes,
)


def decode_wall(
    shape: DecoderShape,
    machine: Machine,
    precision: Precision | None = None,
    batch: int = 1,
    context: int = 1,
) -> float:
    """Tokens/s that no user can exceed: bandwidth over the bytes of a step."""
    return 1.0 / decode_time(shape, machine, batch, context, precision).bandwidth_s


def crossover_tokens(shape: DecoderShape, precision: Precision | None = None) -> float:
    """Cached tokens, over all sequences, at which the cache is as large as the weights."""
    precision = precision or Precision()
    held = weight_bytes(shape, precision.weight_bytes)
    return held / kv_bytes_per_token(shape, precision.kv_bytes)


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


def quadratic_prompt_tokens(shape: DecoderShape) -> float:
    """Prompt length at which attention's FLOPs equal the linear layers': P / (L d)."""
    flops_per_pair = decode_work(shape, 1, 2).flops - decode_work(shape, 1, 1).flops
    linear = decode_work(shape, 1, 1).flops - flops_per_pair
    return linear / (flops_per_pair / 2)


def gemm_intensity(rows: int, d_in: int, d_out: int, element_bytes: float = 2) -> float:
    """FLOP/byte of (rows x d_in)(d_in x d_out), every operand and the result crossing memory once."""
    moved = rows * d_in + d_in * d_out + rows * d_out
    return 2 * rows * d_in * d_out / (element_bytes * moved)


def slot_use(output_tokens: list[int]) -> float:
    """Share of a static batch's slot steps that make a token: the batch ends with its longest member."""
    return sum(output_tokens) / (len(output_tokens) * max(output_tokens))


def littles_law(rate_per_s: float, seconds: float) -> float:
    """Requests in the system on average."""
    return rate_per_s * seconds


def end_to_end_seconds(ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    return ttft_s + (output_tokens - 1) * tpot_s
