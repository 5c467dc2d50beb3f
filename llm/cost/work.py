"""FLOPs and bytes of a step, and the time they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm.cost.machine import Machine, Precision
from llm.cost.memory import STATE_BYTES, kv_elements_per_layer, kv_share
from llm.cost.param_counts import CostError
from llm.cost.shape import DecoderShape

DECODE_ROWS = 8  # a chunk of more new tokens is a prompt's, not a decode or a verification
Bound = Literal["compute", "bandwidth", "communication", "overhead", "capacity", "queue"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step: `new_tokens` positions after `context` cached ones."""

    new_tokens: int
    context: int = 0
    num_logits: int = 1

    def __post_init__(self) -> None:
        if self.new_tokens < 1 or self.context < 0 or not 0 <= self.num_logits <= self.new_tokens:
            raise CostError("a chunk must have at least one new token, and logits only for its own")


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does: arithmetic, and the bytes that have to cross the memory bus."""

    flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.num_bytes


def distinct_experts(num_experts: int, experts_per_token: int, num_tokens: int) -> float:
    """Experts that a step of `num_tokens` touches under uniform routing: E(1 - (1 - k/E)^B)."""
    return num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens)


def weights_read(shape: DecoderShape, num_tokens: int) -> float:
    """Parameters that a step over `num_tokens` tokens has to read."""
    experts = 0.0
    if shape.num_experts:
        experts = distinct_experts(shape.num_experts, shape.experts_per_token, num_tokens)
    return shape.shared_params - shape.embed_params + experts * shape.expert_params


def linear_flops(shape: DecoderShape, num_tokens: int, num_logits: int) -> float:
    """Two per parameter and token; the head only where logits are wanted."""
    body = shape.active_params - shape.embed_params - shape.head_params
    state_updates = 6 * shape.linear_state * shape.num_linear_layers  # decay, read and write of a state
    return (2 * body + state_updates) * num_tokens + 2 * shape.head_params * num_logits


def attended_pairs(new_tokens: int, context: int, window: int = 0) -> float:
    """(query, key) pairs of a causal chunk: query i sees context + i + 1 keys, at most `window`."""
    if not window:
        return new_tokens * context + new_tokens * (new_tokens + 1) / 2
    growing = min(max(window - context, 0), new_tokens)
    return growing * context + growing * (growing + 1) / 2 + (new_tokens - growing) * window


def attention_flops(shape: DecoderShape, new_tokens: int, context: int) -> float:
    """Scores and weighted values: 4 * d per pair under MHA. A single MLA query works on the latent."""
    width = shape.head_dim + shape.value_dim
    if shape.latent_dim and new_tokens == 1:
        width = 2 * shape.latent_dim + shape.rope_dim
    pairs = shape.num_full_layers * attended_pairs(new_tokens, context)
    if shape.num_sliding_layers:
        pairs += shape.num_sliding_layers * attended_pairs(new_tokens, context, shape.sliding_window)
    return 2 * shape.num_heads * width * pairs


def kv_traffic(shape: DecoderShape, new_tokens: int, context: int, element_bytes: float = 2) -> float:
    """Bytes of cache that a chunk moves: what it attends to is read once (its own part: written)."""
    positions = context + new_tokens
    windowed = min(positions, shape.sliding_window + new_tokens - 1)
    layers = shape.num_full_layers * positions + shape.num_sliding_layers * windowed
    state = 2 * shape.linear_state * shape.num_linear_layers * STATE_BYTES
    return layers * kv_elements_per_layer(shape) * element_bytes + state


def step_work(shape: DecoderShape, chunks: Sequence[Chunk], precision: Precision | None = None) -> Work:
    """FLOPs and bytes of one engine step: weights are read once, every cache for itself."""
    if not chunks:
        raise CostError("a step must have at least one chunk")
    precision = precision or Precision()
    num_tokens = sum(chunk.new_tokens for chunk in chunks)
    num_logits = sum(chunk.num_logits for chunk in chunks)
    attention = sum(attention_flops(shape, chunk.new_tokens, chunk.context) for chunk in chunks)
    cache = sum(kv_traffic(shape, chunk.new_tokens, chunk.context, precision.kv_bytes) for chunk in chunks)
    return Work(
        flops=linear_flops(shape, num_tokens, num_logits) + attention,
        weight_bytes=weights_read(shape, num_tokens) * precision.weight_bytes,
        kv_bytes=cache,
    )


def prefill_work(
    shape: DecoderShape, num_tokens: int, num_cached: int = 0, precision: Precision | None = None
) -> Work:
    """A prompt of `num_tokens` whose first `num_cached` are in the cache: 2PN + 2LN^2d when none is."""
    return step_work(shape, [Chunk(num_tokens - num_cached, num_cached)], precision)


def decode_work(shape: DecoderShape, batch: int, context: int, precision: Precision | None = None) -> Work:
    """One token for each of `batch` sequences that attend to `context` positions, their own included."""
    if batch < 1 or context < 1:
        raise CostError("batch and context must be at least 1")
    one = step_work(shape, [Chunk(1, context - 1)], precision)
    precision = precision or Precision()
    return Work(
        flops=one.flops * batch,
        weight_bytes=weights_read(shape, batch) * precision.weight_bytes,
        kv_bytes=one.kv_bytes * batch,
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """max(compute, bandwidth, payload) + collective latency + overhead, in seconds.

    Where arithmetic and memory traffic overlap in part, the rest of the shorter one is added.
    """

    compute_s: float
    bandwidth_s: float
    payload_s: float = 0.0  # bytes over the link; overlaps with the rest
    latency_s: float = 0.0  # of the collectives; each one is waited for
    overhead_s: float = 0.0
    overlap: float = 1.0

    @property
    def seconds(self) -> float:
        longest = max(self.compute_s, self.bandwidth_s, self.payload_s)
        exposed = (1.0 - self.overlap) * min(self.compute_s, self.bandwidth_s)
        return longest + exposed + self.latency_s + self.overhead_s

    @property
    def binds(self) -> Bound:
        """The largest term."""
        terms: dict[Bound, float] = {
            "compute": self.compute_s,
            "bandwidth": self.bandwidth_s,
            "communication": self.payload_s + self.latency_s,
            "overhead": self.overhead_s,
        }
        return max(terms, key=lambda name: terms[name])


def time_work(
    work: Work,
    shape: DecoderShape,
    machine: Machine,
    num_tokens: int,
    precision: Precision | None = None,
    tensor: int = 1,
    decoding: bool = False,
) -> StepTime:
    """The time of `work` on `tensor` devices that share every layer.

    `decoding`: the step has one new token a sequence, or a few. A layer has two all-reduces of
    [num_tokens, d_model] in 16 bits; a ring moves 2(n - 1)/n of that.
    """
    precision = precision or Precision()
    per_device = work.weight_bytes / tensor + work.kv_bytes * kv_share(shape, tensor)
    collectives = 2 * shape.num_layers if tensor > 1 else 0
    payload = 0.0
    if collectives and machine.link_bandwidth:
        moved = 2 * (tensor - 1) / tensor * num_tokens * shape.d_model * 2
        payload = collectives * moved / machine.link_bandwidth
    arithmetic = work.flops / machine.rate(precision.compute_bits, decoding)
    elementwise = num_tokens * shape.num_layers * shape.d_model * machine.element_s
    return StepTime(
        compute_s=(arithmetic + elementwise) / tensor,
        bandwidth_s=machine.stream_seconds(per_device),
        payload_s=payload,
        latency_s=collectives * machine.collective_s,
        overhead_s=machine.step_overhead_s
        + shape.num_layers * machine.layer_overhead_s
        + (0.0 if decoding else machine.cold_step_s),
        overlap=machine.overlap_of(per_device),
    )


def step_time(
    shape: DecoderShape,
    machine: Machine,
    chunks: Sequence[Chunk],
    precision: Precision | None = None,
    tensor: int = 1,
) -> StepTime:
    """The time of one engine step over `chunks`."""
    num_tokens = sum(chunk.new_tokens for chunk in chunks)
    decoding = max(chunk.new_tokens for chunk in chunks) <= DECODE_ROWS
    work = step_work(shape, chunks, precision)
    return time_work(work, shape, machine, num_tokens, precision, tensor, decoding)


def prefill_time(
    shape: DecoderShape,
    machine: Machine,
    num_tokens: int,
    num_cached: int = 0,
    precision: Precision | None = None,
    tensor: int = 1,
) -> StepTime:
    """The time from an idle engine to the first token of a prompt, its first `num_cached` tokens cached."""
    chunk = Chunk(num_tokens - num_cached, num_cached)
    return step_time(shape, machine, [chunk], precision, tensor)


def decode_time(
    shape: DecoderShape,
    machine: Machine,
    batch: int,
    context: int,
    precision: Precision | None = None,
    tensor: int = 1,
) -> StepTime:
    """TPOT of `batch` sequences that all attend to `context` positions."""
    work = decode_work(shape, batch, context, precision)
    return time_work(work, shape, machine, batch, precision, tensor, decoding=True)
