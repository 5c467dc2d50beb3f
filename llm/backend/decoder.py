"""The decoder, in reading order: weights, rope, layer, forward. Its KV pool: llm.backend.kv_pool.

One ragged batch of tokens [T, d_model] runs through every linear, whatever sequences they belong to;
only attention looks at sequences. Reference: transformers' modeling_llama, modeling_qwen2, modeling_qwen3,
modeling_mistral and modeling_gemma3, whose logits it reproduces.

Letters in shapes: T tokens, H query heads, K KV heads, G = H / K, D head_dim, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.backend.kv_pool import KvPool, LayerKv
from llm.decoder_config import DecoderConfig, Rope


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linear weights are [out, in]. Absent biases and norms are None."""

    attention_norm: Tensor  # [d_model]
    qkv: Tensor  # [(H + 2K) D, d_model]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [d_model, H D]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [d_model]
    gate_up: Tensor  # [2 d_ff, d_model]
    gate_up_bias: Tensor | None
    down: Tensor  # [d_model, d_ff]
    down_bias: Tensor | None
    post_attention_norm: Tensor | None = None  # [d_model], on what attention adds
    post_mlp_norm: Tensor | None = None  # [d_model], on what the MLP adds


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocab_size, d_model]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [d_model]
    lm_head: Tensor  # [vocab_size, d_model]; the embedding itself when tied


class StepAttention(Protocol):
    """Each row of a step over the keys that it sees: llm.backend.span_attention, or one kernel on a GPU."""

    def __call__(self, q: Tensor, kv: LayerKv, window: int) -> Tensor:
        """q [T, H, D] over one layer's kv, of the last `window` keys where it is not 0; returns [T, H D]."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """One step's input on the device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where in the pool each token's KV goes
    attention: StepAttention
    logit_rows: Tensor  # int64 [R]
    visuals: tuple[tuple[int, Tensor], ...]  # (first row, [length, row_width])
    rope: Tensor | None = None  # int64 [3, T]; None: `positions` on every axis


def rope_table(
    rope: Rope, num_positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [num_positions, 1, D]: rotated = x * cos + roll(x, D / 2) * sin."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * torch.from_numpy(rope.inv_freq())
    cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return table[0][:, None].to(device, dtype), table[1][:, None].to(device, dtype)


class Decoder:
    """Config, weights and rope tables; every state of a sequence lives in the pool given to `forward`."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, num_positions: int) -> None:
        self.config = config
        self.weights = weights
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.rotations = tuple(rope_table(rope, num_positions, device, dtype) for rope in config.ropes)
        self.ticks = np.zeros(1, np.int64)  # layers done

    def forward(self, batch: DecoderInputs, pool: KvPool) -> Tensor:
        """Writes the batch's KV into `pool` and returns logits [R, vocab_size] of the wanted rows."""
        x = F.embedding(batch.token_ids, self.weights.embedding)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        for first, rows in batch.visuals:
            x[first : first + rows.shape[0]] = self._set_of(rows, 0, x)
        rotations = [(self._turns(cos, batch), self._turns(sin, batch)) for cos, sin in self.rotations]
        last = self.config.num_layers - 1
        for i, layer in enumerate(self.weights.layers):
            self.ticks[0] += 1
            kv = pool.layer(i)
            q = self._project(layer, x, *rotations[self.config.layer_ropes[i]], batch.slots, kv)
            if i == last and not batch.logit_rows.numel():
                break
            attended = batch.attention(q, kv, self.config.windows[i])
            if i == last:  # beyond its KV, the last layer matters to the wanted rows only
                x, attended = x[batch.logit_rows], attended[batch.logit_rows]
            x = self._residual(attended, layer.out, layer.out_bias, layer.post_attention_norm, x)
            x = self._mlp(layer, x)
            if i < self.config.deepstack:
                for first, rows in batch.visuals:
                    x[first : first + rows.shape[0]] += self._set_of(rows, 1 + i, x)
        if not batch.logit_rows.numel():
            return x.new_empty((0, self.config.vocab_size))
        return F.linear(self._norm(x, self.weights.norm), self.weights.lm_head)

    def _set_of(self, rows: Tensor, index: int, x: Tensor) -> Tensor:
        """Visual tokens' rows of set `index`, [length, d_model], as x is kept."""
        d = self.config.d_model
        return rows[:, index * d : (index + 1) * d].to(x.device, x.dtype)

    def _turns(self, table: Tensor, batch: DecoderInputs) -> Tensor:
        """A table's values for every row of the batch, [T, 1, D]."""
        axes = self.config.rope_axes
        if batch.rope is None or not axes:
            return table[batch.positions]
        index = batch.rope[list(axes * 2)].t()  # both halves of a head turn by the same frequencies
        return table[index, 0, torch.arange(index.shape[1], device=index.device)][:, None]

    def _project(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: LayerKv
    ) -> Tensor:
        """Writes rotated keys and values into one layer's kv; returns rotated queries [T, H, D]."""
        c = self.config
        heads = F.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        heads = heads.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = heads[:, : c.num_heads + c.num_kv_heads], heads[:, c.num_heads + c.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (
                self._norm(qk[:, : c.num_heads], layer.q_norm),
                self._norm(qk[:, c.num_heads :], layer.k_norm),
            )
            qk = torch.cat((q, k), 1)
        qk = torch.addcmul(qk * cos, qk.roll(c.head_dim // 2, -1), sin)
        kv.write(slots, qk[:, c.num_heads :], v)
        return qk[:, : c.num_heads]

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        if self.config.activation == "silu":
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(gate, approximate="tanh") * up
        return self._residual(hidden, layer.down, layer.down_bias, layer.post_mlp_norm, x)

    def _residual(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual + linear(x), in one call where no norm comes between."""
        if norm is not None:
            return residual + self._norm(F.linear(x, weight, bias), norm)
        return torch.addmm(residual if bias is None else residual + bias, x, weight.t())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)
