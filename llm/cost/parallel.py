"""Splitting a model over devices: tensor, pipeline, expert, and what each of them costs.

Reference: Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm.cost.machine import Machine, Precision
from llm.cost.memory import held_weight_bytes, kv_bytes, kv_share
from llm.cost.param_counts import CostError
from llm.cost.shape import DecoderShape
from llm.cost.work import StepTime, decode_work, time_work, weights_read


@dataclass(frozen=True, slots=True)
class Parallel:
    """Devices per replica: `tensor` share every layer, `pipeline` groups share the layers out.

    `expert` devices share the routed experts out and run attention each for its part of the batch.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.expert, self.replicas) < 1:
            raise CostError("a parallel degree must be at least 1")
        if self.expert > 1 and (self.tensor > 1 or self.pipeline > 1):
            raise CostError("expert parallelism is modelled alone, not with tensor or pipeline parallelism")

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.expert * self.replicas


def check_parallel(shape: DecoderShape, parallel: Parallel) -> None:
    """Raises CostError for a split that the model doesn't allow."""
    if parallel.tensor > shape.num_heads:
        raise CostError("there are more tensor-parallel devices than query heads")
    if parallel.pipeline > shape.num_layers:
        raise CostError("there are more pipeline stages than layers")
    if parallel.expert > max(shape.num_experts, 1):
        raise CostError("there are more expert-parallel devices than experts")


def device_weight_bytes(shape: DecoderShape, parallel: Parallel, precision: Precision | None = None) -> float:
    """Weights on one device."""
    precision = precision or Precision()
    if parallel.expert > 1:
        routed = shape.num_experts * shape.expert_params
        return (shape.shared_params + routed / parallel.expert) * precision.weight_bytes
    return held_weight_bytes(shape, precision) / (parallel.tensor * parallel.pipeline)


def device_kv_share(shape: DecoderShape, parallel: Parallel) -> float:
    """Share of all sequences' cache on the fullest device. Tensor parallelism stops helping at n_kv."""
    return kv_share(shape, parallel.tensor) / (parallel.pipeline * parallel.expert)


def kv_capacity_bytes(
    shape: DecoderShape,
    machine: Machine,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
) -> float:
    """Bytes of cache, over all sequences, that a replica holds beside weights and workspace."""
    precision, parallel = precision or Precision(), parallel or Parallel()
    held = device_weight_bytes(shape, parallel, precision) + machine.workspace_bytes
    return max(0.0, machine.memory_bytes - held) / device_kv_share(shape, parallel)


def max_batch(
    shape: DecoderShape,
    machine: Machine,
    context: int,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
    block_size: int = 1,
) -> int:
    """B_max of a replica: sequences of `context` tokens beside weights and workspace; 0 without room."""
    precision, parallel = precision or Precision(), parallel or Parallel()
    room = machine.memory_bytes - machine.workspace_bytes
    room -= int(device_weight_bytes(shape, parallel, precision))
    one = kv_bytes(shape, context, precision.kv_bytes, block_size) * device_kv_share(shape, parallel)
    return max(0, int(room // one)) if one else 0


def pipeline_decode_time(
    shape: DecoderShape,
    machine: Machine,
    batch: int,
    context: int,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
) -> StepTime:
    """TPOT with the batch split into one group per stage: every token still crosses all stages in order.

    A group reads all weights (one stage after another) and its own caches only; each boundary costs a hop.
    """
    parallel = parallel or Parallel()
    group = -(-batch // parallel.pipeline)
    work = decode_work(shape, group, context, precision)
    one = time_work(work, shape, machine, group, precision, parallel.tensor, decoding=True)
    hops = (parallel.pipeline - 1) * machine.hop_s
    launches = (parallel.pipeline - 1) * machine.step_overhead_s  # a stage is a step of its own
    return replace(one, latency_s=one.latency_s + hops, overhead_s=one.overhead_s + launches)


def expert_decode_time(
    shape: DecoderShape,
    machine: Machine,
    batch: int,
    context: int,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
) -> StepTime:
    """TPOT with experts spread over devices: two all-to-alls per layer carry k copies of every token."""
    parallel, precision = parallel or Parallel(), precision or Precision()
    n = parallel.expert
    local = -(-batch // n)
    work = decode_work(shape, local, context, precision)
    shared = shape.shared_params - shape.embed_params
    routed = weights_read(shape, batch) - shared
    weights = (shared + routed / n) * precision.weight_bytes
    one = time_work(replace(work, weight_bytes=weights), shape, machine, local, precision, decoding=True)
    if n == 1:
        return one
    collectives = 2 * shape.num_layers
    moved = (n - 1) / n * local * shape.experts_per_token * shape.d_model * 2
    payload = collectives * moved / machine.link_bandwidth if machine.link_bandwidth else 0.0
    return replace(one, payload_s=payload, latency_s=collectives * machine.collective_s)


def parallel_decode_time(
    shape: DecoderShape,
    machine: Machine,
    batch: int,
    context: int,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
) -> StepTime:
    """TPOT of one replica at this batch, split as `parallel` says."""
    parallel = parallel or Parallel()
    check_parallel(shape, parallel)
    if parallel.expert > 1:
        return expert_decode_time(shape, machine, batch, context, precision, parallel)
    return pipeline_decode_time(shape, machine, batch, context, precision, parallel)
