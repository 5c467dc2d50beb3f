"""Bytes that stay resident: weights, KV, and the inference and training ledgers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm.cost.machine import Precision
from llm.cost.param_counts import CostError
from llm.cost.shape import DecoderShape

STATE_BYTES = 4  # linear-attention states are kept in float32


def kv_elements_per_layer(shape: DecoderShape) -> int:
    """Cached elements per token and attention layer: K and V of every KV head, or MLA's latent and key."""
    if shape.latent_dim:
        return shape.latent_dim + shape.rope_dim
    return shape.num_kv_heads * (shape.head_dim + shape.value_dim)


def kv_bytes_per_token(shape: DecoderShape, element_bytes: float = 2) -> float:
    """What one more token adds: 2 * L * n_kv * d_head * s. Layers with a window count while it isn't full."""
    layers = shape.num_full_layers + shape.num_sliding_layers
    return layers * _whole(kv_elements_per_layer(shape) * element_bytes)


def _whole(num_bytes: float) -> float:
    """An element's share of a scale may have no exact float, but heads come to whole bytes."""
    return round(num_bytes) if math.isclose(num_bytes, round(num_bytes), rel_tol=1e-9) else num_bytes


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def kv_bytes(shape: DecoderShape, num_tokens: int, element_bytes: float = 2, block_size: int = 1) -> int:
    """Bytes that one sequence of `num_tokens` holds, its last block counted whole.

    `block_size=1` is the theoretical size. Raises CostError for a negative count.
    """
    if num_tokens < 0 or block_size < 1:
        raise CostError("token counts must be at least 0, and blocks must hold at least 1")
    held = num_blocks(num_tokens, block_size) * block_size
    window = held if shape.keeps_all else num_blocks(shape.sliding_window, block_size) * block_size
    windowed = min(held, window)
    per_layer = _whole(kv_elements_per_layer(shape) * element_bytes)
    growing = (shape.num_full_layers * held + shape.num_sliding_layers * windowed) * per_layer
    state = shape.linear_state * shape.num_linear_layers * STATE_BYTES if num_tokens else 0
    return math.ceil(growing) + state


def kv_shards(shape: DecoderShape, tensor: int) -> int:
    """Over how many of `tensor` ranks the cache really divides. MLA's latent belongs to every head: 1."""
    return 1 if shape.latent_dim else min(tensor, shape.num_kv_heads)


def kv_copies(shape: DecoderShape, tensor: int) -> float:
    """How often the cache is held in all: above 1 once there are more ranks than KV heads."""
    return tensor / kv_shards(shape, tensor)


def kv_share(shape: DecoderShape, tensor: int) -> float:
    """The fullest rank's share of a sequence's cache; a rank holds whole heads."""
    if shape.latent_dim:
        return 1.0
    return num_blocks(shape.num_kv_heads, kv_shards(shape, tensor)) / shape.num_kv_heads


def weight_bytes(shape: DecoderShape, element_bytes: float = 2) -> int:
    return math.ceil(shape.num_params * element_bytes)


def held_weight_bytes(shape: DecoderShape, precision: Precision) -> int:
    """What the engine holds where that is known, else `weight_bytes` a parameter."""
    return precision.held_bytes or weight_bytes(shape, precision.weight_bytes)


def logits_bytes(shape: DecoderShape, num_positions: int) -> int:
    """In float32."""
    return 4 * num_positions * shape.vocab_size


def activation_bytes(shape: DecoderShape, num_tokens: int, num_logits: int) -> int:
    """Peak transients of a step: the widest layer's 16-bit rows, and float32 logits where wanted."""
    widest = max(shape.intermediate_size, shape.num_heads * shape.head_dim, shape.d_model)
    return 2 * num_tokens * widest + logits_bytes(shape, num_logits)


@dataclass(frozen=True, slots=True)
class InferenceLedger:
    """Bytes on the fullest device while serving."""

    weights: int
    kv: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.workspace


def inference_ledger(
    shape: DecoderShape,
    num_sequences: int,
    context: int,
    precision: Precision | None = None,
    workspace_bytes: int = 0,
    block_size: int = 1,
    tensor: int = 1,
) -> InferenceLedger:
    """Weights, caches of `num_sequences` at `context` tokens, decode transients and the engine's own."""
    precision = precision or Precision()
    one = kv_bytes(shape, context, precision.kv_bytes, block_size)
    return InferenceLedger(
        weights=math.ceil(held_weight_bytes(shape, precision) / tensor),
        kv=math.ceil(num_sequences * one * kv_share(shape, tensor)),
        activations=activation_bytes(shape, num_sequences, num_sequences),
        workspace=workspace_bytes,
    )
