"""The decoder, in reading order: weights, rope, attention, layer, forward. Its KV pool: llm.backend.kv_pool.

One ragged batch of tokens [T, d_model] runs through every linear, whatever sequences they belong to;
only attention looks at sequences. Reference: transformers' modeling_llama, modeling_qwen2, modeling_qwen3,
modeling_mistral and modeling_gemma3, whose logits it reproduces.

Letters in shapes: T tokens, H query heads, K KV heads, G = H / K, D head_dim, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.backend.kv_pool import KvPool, LayerKv
from llm.decoder_config import DecoderConfig, Rope

PADDED_ELEMENTS = 1 << 16
"""Decode attention of a whole batch is one padded call up to this many gathered KV elements, and one
call per sequence above: beneath it the calls' overhead outweighs the padding."""


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


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Rows [begin, end) of the batch are one sequence's positions [length - (end - begin), length)."""

    begin: int
    end: int
    length: int
    blocks: Tensor  # int64 [ceil(length / block_size)]
    first_block: int | None  # the first block when all are consecutive: its KV is a slice, not a gather
    visible: Tensor | None = (
        None  # int64 [end - begin]: keys that each row sees, where they are more than causal
    )


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """One step's input on the device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where in the pool each token's KV goes
    spans: tuple[SequenceSpan, ...]
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


def attend_span(q: Tensor, k: Tensor, v: Tensor, window: int, visible: Tensor | None = None) -> Tensor:
    """One sequence: q [n, H, D] at the last n of L positions, k and v [K, L, D]. Returns [n, H D].

    visible: int64 [n], the keys [0, visible) that each query sees; None: causal.
    """
    n, num_heads, dim = q.shape
    num_kv_heads, length, _ = k.shape
    if n == 1:
        first = max(0, length - window) if window else 0
        # The group's query heads stand in for query positions: no mask, no repeated keys.
        folded = q.view(num_kv_heads, num_heads // num_kv_heads, dim)
        out = F.scaled_dot_product_attention(folded[None], k[None, :, first:], v[None, :, first:])
        return out.reshape(1, num_heads * dim)
    causal = n == length and not window and visible is None
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=None if causal else _mask(n, length, window, visible, q.device),
        is_causal=causal,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out[0].transpose(0, 1).reshape(n, num_heads * dim)


def _mask(n: int, length: int, window: int, visible: Tensor | None, device: torch.device) -> Tensor:
    """bool [n, L], True where the query at position length - n + i sees key j."""
    query = torch.arange(length - n, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    mask = key <= query if visible is None else key < visible[:, None]
    return mask & (key > query - window) if window else mask


def attend_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Many sequences of one query each: q [B, H, D], k and v [K, B, L, D], mask bool [B, 1, 1, L]."""
    batch, num_heads, dim = q.shape
    folded = q.view(batch, k.shape[0], -1, dim)
    out = F.scaled_dot_product_attention(folded, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask)
    return out.reshape(batch, num_heads * dim)


def _keys_values(kv: LayerKv, span: SequenceSpan) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values, [K, L, D] each."""
    if span.first_block is not None:
        return kv.slice(span.first_block * kv.block_size, span.length)
    k, v = kv.gather(span.blocks)
    return k[:, : span.length], v[:, : span.length]


@dataclass(frozen=True, slots=True)
class PaddedDecode:
    """The batch's one-token sequences, when attending to all of them at once is cheaper."""

    rows: Tensor  # int64 [B]
    blocks: Tensor  # int64 [B * width]
    lengths: Tensor  # int64 [B]
    width: int  # blocks per sequence


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
        padded, spans = self._split(batch, pool.block_size)
        last = self.config.num_layers - 1
        for i, layer in enumerate(self.weights.layers):
            self.ticks[0] += 1
            kv = pool.layer(i)
            q = self._project(layer, x, *rotations[self.config.layer_ropes[i]], batch.slots, kv)
            if i == last and not batch.logit_rows.numel():
                break
            attended = self._attend(q, kv, padded, spans, self.config.windows[i])
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

    def _attend(
        self,
        q: Tensor,
        kv: LayerKv,
        padded: PaddedDecode | None,
        spans: tuple[SequenceSpan, ...],
        window: int,
    ) -> Tensor:
        """q [T, H, D] over one layer's kv; returns [T, H D]."""
        if not padded and len(spans) == 1:
            k, v = _keys_values(kv, spans[0])
            return attend_span(q, k, v, window, spans[0].visible)
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        if padded:
            k, v = kv.gather(padded.blocks)
            position = torch.arange(padded.width * kv.block_size, device=q.device)
            mask = position < padded.lengths[:, None]
            if window:
                mask &= position >= padded.lengths[:, None] - window
            shape = (self.config.num_kv_heads, padded.rows.shape[0], -1, self.config.head_dim)
            out[padded.rows] = attend_padded(
                q[padded.rows], k.view(shape), v.view(shape), mask[:, None, None]
            )
        for span in spans:
            k, v = _keys_values(kv, span)
            out[span.begin : span.end] = attend_span(q[span.begin : span.end], k, v, window, span.visible)
        return out

    def _split(
        self, batch: DecoderInputs, block_size: int
    ) -> tuple[PaddedDecode | None, tuple[SequenceSpan, ...]]:
        """One-token sequences to attend to at once, and the spans to attend to one by one."""
        single = [span for span in batch.spans if span.end - span.begin == 1]
        width = max((span.blocks.shape[0] for span in single), default=0)
        elements = width * block_size * len(single) * self.config.num_kv_heads * self.config.head_dim
        on_cpu = batch.token_ids.device.type == "cpu"
        if len(single) < 2 or (on_cpu and elements > PADDED_ELEMENTS):
            return None, batch.spans
        blocks = torch.nn.utils.rnn.pad_sequence([span.blocks for span in single], batch_first=True)
        device = batch.token_ids.device
        padded = PaddedDecode(
            rows=torch.tensor([span.begin for span in single], device=device),
            blocks=blocks.flatten(),
            lengths=torch.tensor([span.length for span in single], device=device),
            width=width,
        )
        return padded, tuple(span for span in batch.spans if span.end - span.begin > 1)

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
