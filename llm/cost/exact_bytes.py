"""Exact bytes of this engine's buffers: packed weights with their scales, and KV blocks.

The native backend packs outputs in sixteens; its buffers are counted here to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm.cost.machine import Precision
from llm.cost.shape import DecoderShape
from llm.cost.work import weights_read
from llm.decoder_config import DecoderConfig
from llm.storage import INT4_GROUP, KvStorage, WeightOption, embedding_storage, head_storage

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # one a position and KV head for keys, one for values; one an output of int8 weights
INT4_GROUP_BYTES = INT4_GROUP // 2 + 2  # nibbles and a bfloat16 scale


def padded(count: int) -> int:
    """Outputs and head elements are stored in sixteens."""
    return -(-count // 16) * 16


def linear_bytes(n: int, k: int, storage: WeightOption) -> int:
    """A packed [n, k] weight with its scales."""
    if storage == "int4":
        return padded(n) * -(-k // INT4_GROUP) * INT4_GROUP_BYTES
    scales = padded(n) * SCALE_BYTES if storage == "int8" else 0
    return padded(n) * k * ELEMENT_BYTES[storage] + scales


def kv_element_bytes(storage: KvStorage, head_dim: int) -> float:
    """Bytes per cached element, its share of a scale included."""
    return ELEMENT_BYTES[storage] + (SCALE_BYTES / head_dim if storage == "int8" else 0.0)


def kv_block_bytes(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    storage: KvStorage = "float32",
    value_dim: int | None = None,
) -> int:
    """One block of a pool of keys and values, scales included, as it is allocated.

    `value_dim`: stored elements of a value, where they are more than `head_dim`.
    """
    element_bytes = ELEMENT_BYTES[storage]
    keys = num_layers * num_kv_heads * head_dim * element_bytes
    values = num_layers * num_kv_heads * (value_dim or head_dim) * element_bytes
    scales = 2 * num_layers * num_kv_heads * SCALE_BYTES if storage == "int8" else 0
    return block_size * (keys + values + scales)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Buffers of the native backend, in bytes."""

    linears: int  # of the layers, with scales; read in every step
    head: int  # likewise
    embedding: int  # looked up; a copy of its own although the head is tied to it
    vectors: int  # norms and biases
    tables: int  # cosines and sines

    @property
    def per_step(self) -> int:
        return self.linears + self.head

    @property
    def held(self) -> int:
        return self.linears + self.head + self.embedding + self.vectors + self.tables


def native_weight_bytes(
    config: DecoderConfig, storage: WeightOption, embedding: WeightOption, num_positions: int
) -> WeightBytes:
    """What the native backend holds of a checkpoint whose token embeddings lose nothing as `embedding`.

    `num_positions` bounds the rope tables.
    """
    c = config
    heads, qkv = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    gate_up = 2 * padded(c.d_ff)
    shapes = ((qkv, c.d_model), (c.d_model, heads), (gate_up, c.d_model), (c.d_model, c.d_ff))
    biases = padded(qkv) * c.qkv_bias + padded(c.d_model) * c.out_bias
    biases += (gate_up + padded(c.d_model)) * c.mlp_bias
    norms = (4 if c.post_norms else 2) * c.d_model + 2 * c.head_dim * c.qk_norm
    return WeightBytes(
        linears=c.num_layers * sum(linear_bytes(n, k, storage) for n, k in shapes),
        head=linear_bytes(c.vocab_size, c.d_model, head_storage(storage)),
        embedding=c.vocab_size * c.d_model * ELEMENT_BYTES[embedding_storage(storage, embedding)],
        vectors=4 * (c.num_layers * (biases + norms) + c.d_model),
        tables=4 * len(c.ropes) * num_positions * c.head_dim,
    )


def stored_precision(
    shape: DecoderShape,
    weights: WeightOption,
    kv: KvStorage,
    config: DecoderConfig | None = None,
    embedding: WeightOption = "float32",
) -> Precision:
    """The byte ledger of these storages, scales included.

    With `config` the weights are those of the native backend, to the byte; without it every parameter counts
    alike.
    """
    cached = kv_element_bytes(kv, shape.head_dim)
    if config is None:
        shared = {"int4": INT4_GROUP_BYTES / INT4_GROUP, "int8": 1 + SCALE_BYTES / shape.d_model}
        return Precision(shared.get(weights) or ELEMENT_BYTES[weights], cached)
    held = native_weight_bytes(config, weights, embedding, config.max_positions)
    return Precision(held.per_step / weights_read(shape, 1), cached, held_bytes=held.held)
