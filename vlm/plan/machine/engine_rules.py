"""What the engine asks while it serves, answered by `llm.cost` on this machine's own rates."""

from __future__ import annotations

from functools import lru_cache

import psutil

from llm.backend.base import Backend
from llm.cost import (
    DecoderShape,
    Machine,
    Precision,
    make_swap_rule,
    recompute_seconds,
    stored_precision,
)
from llm.engine_config import SwapRule
from llm.scheduling.saved_prefixes import ReadRule
from vlm.checkpoint import Checkpoint
from vlm.config import EngineOptions
from vlm.model_source import ModelSource
from vlm.plan.machine.rates import copy_bandwidth, gemm_rate
from vlm.spec import BLOCK_SIZE

DISK_BYTES_S = 5e8  # at which a disk is taken to read
FILE_S = 1e-4  # to open a file


@lru_cache(maxsize=2)
def this_machine(options: EngineOptions) -> tuple[DecoderShape, Machine, Precision]:
    """The decoder of these options, this machine's rates, measured here, and what is stored as what."""
    copied = copy_bandwidth(rounds=2)
    machine = Machine(
        name="this machine",
        peak_flops=gemm_rate(options.device, rounds=1),
        bandwidth=copied,
        memory_bytes=psutil.virtual_memory().total,
        host_bandwidth=copied,
    )
    shape = Checkpoint.read(ModelSource.parse(options.model).directory).shape
    weights = options.dtype if options.weights == "auto" else options.weights
    return shape, machine, stored_precision(shape, weights, options.kv_storage)


def swap_rule(options: EngineOptions) -> SwapRule:
    """`llm.cost`'s rule on this machine's own rates, which are measured when it is first asked."""

    @lru_cache(maxsize=1)
    def rule() -> SwapRule:
        return make_swap_rule(*this_machine(options), BLOCK_SIZE)

    return lambda num_tokens, num_blocks: rule()(num_tokens, num_blocks)


def read_rule(options: EngineOptions, backend: Backend) -> ReadRule:
    """Whether blocks come sooner from a disk of `DISK_BYTES_S` than from a prefill, by `llm.cost`."""

    @lru_cache(maxsize=1)
    def known() -> tuple[DecoderShape, Machine, Precision, int]:
        shape, machine, precision = this_machine(options)
        return shape, machine, precision, len(backend.save_blocks((0,))[0])

    def rule(num_tokens: int, num_blocks: int) -> bool:
        shape, machine, precision, block_bytes = known()
        read_s = num_blocks * (block_bytes / DISK_BYTES_S + FILE_S)
        return read_s < recompute_seconds(shape, machine, num_tokens, 0, precision)

    return rule
