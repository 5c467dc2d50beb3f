"""Decisions that follow from bytes and FLOPs: what the engine and the planner both ask."""

from __future__ import annotations

from collections.abc import Callable

from llm.cost.machine import Machine, Precision
from llm.cost.memory import kv_bytes
from llm.cost.shape import DecoderShape
from llm.cost.work import prefill_time


def swap_seconds(
    shape: DecoderShape,
    machine: Machine,
    num_tokens: int,
    precision: Precision | None = None,
    block_size: int = 1,
) -> float:
    """Time to move a sequence's cache to host memory and back; infinite without a path there."""
    if not machine.host_bandwidth:
        return float("inf")
    precision = precision or Precision()
    return 2 * kv_bytes(shape, num_tokens, precision.kv_bytes, block_size) / machine.host_bandwidth


def recompute_seconds(
    shape: DecoderShape,
    machine: Machine,
    num_tokens: int,
    num_cached: int = 0,
    precision: Precision | None = None,
) -> float:
    """Time to prefill a dropped sequence again; `num_cached` of its tokens will still be in shared blocks."""
    if num_tokens <= num_cached:
        return 0.0
    return prefill_time(shape, machine, num_tokens, num_cached, precision).seconds


def make_swap_rule(
    shape: DecoderShape, machine: Machine, precision: Precision | None = None, block_size: int = 16
) -> Callable[[int, int], bool]:
    """The engine's question as it asks it: (tokens to recompute, blocks to copy) -> swap?"""

    def swap(num_tokens: int, num_blocks: int) -> bool:
        moved = swap_seconds(shape, machine, num_blocks * block_size, precision)
        return moved < recompute_seconds(shape, machine, num_tokens, 0, precision)

    return swap


def batch_at_ridge(machine: Machine, precision: Precision | None = None) -> float:
    """B*: rows per weight read at which decode's linear layers stop being bandwidth-bound, s_w * I* / 2."""
    precision = precision or Precision()
    return precision.weight_bytes * machine.ridge(precision.compute_bits) / 2


def expected_tokens(acceptance: float, num_draft: int) -> float:
    """Tokens per verification of `num_draft` proposals: (1 - a^(g + 1)) / (1 - a)."""
    if acceptance >= 1.0:
        return num_draft + 1.0
    return (1.0 - acceptance ** (num_draft + 1)) / (1.0 - acceptance)


def speculation_speedup(acceptance: float, num_draft: int, draft_cost: float) -> float:
    """Against one token per step; `draft_cost` is one proposal's cost in target steps."""
    return expected_tokens(acceptance, num_draft) / (1.0 + num_draft * draft_cost)
