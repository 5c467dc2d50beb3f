"""What the articles compute and neither engine nor planner asks, from the product's bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm.cost import (
    DecoderShape,
    Machine,
    Precision,
    batch_at_ridge,
    decode_time,
    decode_work,
    kv_bytes_per_token,
    recompute_seconds,
    swap_seconds,
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


def quadratic_prompt_tokens(shape: DecoderShape) -> float:
    """Prompt length at which attention's FLOPs equal the linear layers': P / (L d)."""
    flops_per_pair = decode_work(shape, 1, 2).flops - decode_work(shape, 1, 1).flops
    linear = decode_work(shape, 1, 1).flops - flops_per_pair
    return linear / (flops_per_pair / 2)


def gemm_intensity(rows: int, d_in: int, d_out: int, element_bytes: float = 2) -> float:
    """FLOP/byte of (rows x d_in)(d_in x d_out), every operand and the result crossing memory once."""
    moved = rows * d_in + d_in * d_out + rows * d_out
    return 2 * rows * d_in * d_out / (element_bytes * moved)


def padding_waste(tiles: Sequence[int]) -> float:
    """Share of the tower's work that is padding if every image of a batch is padded to the largest."""
    return 1.0 - sum(tiles) / (max(tiles) * len(tiles))


@dataclass(frozen=True, slots=True)
class TrainingLedger:
    """Bytes of mixed-precision Adam, unsharded; (least, most) where practice differs."""

    weights: int
    master: int
    gradients: tuple[int, int]  # kept in 16 or in 32 bits
    moments: int
    activations: tuple[int, int]
    workspace: tuple[int, int]

    @property
    def total(self) -> tuple[int, int]:
        fixed = self.weights + self.master + self.moments
        low = self.gradients[0] + self.activations[0] + self.workspace[0]
        high = self.gradients[1] + self.activations[1] + self.workspace[1]
        return fixed + low, fixed + high


def training_ledger(
    num_params: int,
    activations: tuple[int, int] = (10_000_000_000, 60_000_000_000),
    workspace: tuple[int, int] = (1_000_000_000, 3_000_000_000),
) -> TrainingLedger:
    """16-bit weights, float32 master weights and moments; activations as checkpointing leaves them."""
    return TrainingLedger(
        weights=2 * num_params,
        master=4 * num_params,
        gradients=(2 * num_params, 4 * num_params),
        moments=8 * num_params,
        activations=activations,
        workspace=workspace,
    )


def swap_is_cheaper(
    shape: DecoderShape,
    machine: Machine,
    num_tokens: int,
    num_cached: int = 0,
    precision: Precision | None = None,
    block_size: int = 1,
) -> bool:
    """Whether a preempted sequence should be swapped to host memory rather than recomputed later."""
    private = max(0, num_tokens - num_cached)
    swap = swap_seconds(shape, machine, private, precision, block_size)
    return swap < recompute_seconds(shape, machine, num_tokens, num_cached, precision)


def speculation_pays(
    batch: int, num_draft: int, machine: Machine, precision: Precision | None = None
) -> bool:
    """Whether `num_draft` proposals for each of `batch` sequences stay under the ridge: B(g + 1) <= B*."""
    return batch * (num_draft + 1) <= batch_at_ridge(machine, precision)
