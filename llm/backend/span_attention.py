"""Attention by torch's own operator, sequence by sequence; decodes together where that is cheaper.

Letters in shapes: T tokens, H query heads, K KV heads, D head_dim, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.backend.kv_pool import LayerKv
from llm.backend.ragged import Ragged
from llm.decoder_config import DecoderConfig

PADDED_ELEMENTS = 1 << 16
"""Decode attention of a whole batch is one padded call up to this many gathered KV elements, and one
call per sequence above: beneath it the calls' overhead outweighs the padding."""


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


class SpanAttention:
    """A step's `llm.backend.decoder.StepAttention`."""

    def __init__(self, ragged: Ragged, config: DecoderConfig, block_size: int, device: torch.device) -> None:
        spans = tuple(_span(ragged, i, device) for i in range(len(ragged.lengths)))
        position_elements = config.num_kv_heads * config.head_dim
        self._padded = _padded(spans, block_size * position_elements, device)
        self._spans = spans
        if self._padded is not None:
            self._spans = tuple(span for span in spans if span.end - span.begin > 1)

    def __call__(self, q: Tensor, kv: LayerKv, window: int) -> Tensor:
        """See StepAttention."""
        padded, spans = self._padded, self._spans
        if padded is None and len(spans) == 1:
            k, v = _keys_values(kv, spans[0])
            return attend_span(q, k, v, window, spans[0].visible)
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        if padded is not None:
            k, v = kv.gather(padded.blocks)
            position = torch.arange(padded.width * kv.block_size, device=q.device)
            mask = position < padded.lengths[:, None]
            if window:
                mask &= position >= padded.lengths[:, None] - window
            shape = (k.shape[0], padded.rows.shape[0], -1, k.shape[-1])
            out[padded.rows] = attend_padded(
                q[padded.rows], k.view(shape), v.view(shape), mask[:, None, None]
            )
        for span in spans:
            k, v = _keys_values(kv, span)
            out[span.begin : span.end] = attend_span(q[span.begin : span.end], k, v, window, span.visible)
        return out


def _span(ragged: Ragged, i: int, device: torch.device) -> SequenceSpan:
    blocks = ragged.blocks[ragged.block_start[i] : ragged.block_start[i + 1]]
    consecutive = bool((np.diff(blocks) == 1).all())
    return SequenceSpan(
        begin=int(ragged.offsets[i]),
        end=int(ragged.offsets[i + 1]),
        length=int(ragged.lengths[i]),
        blocks=torch.from_numpy(blocks).to(device, torch.int64),
        first_block=int(blocks[0]) if consecutive else None,
        visible=_visible(ragged, i, device),
    )


def _visible(ragged: Ragged, i: int, device: torch.device) -> Tensor | None:
    if ragged.visible is None:
        return None
    rows = slice(int(ragged.offsets[i]), int(ragged.offsets[i + 1]))
    if (ragged.visible[rows] == ragged.positions[rows] + 1).all():
        return None
    return torch.from_numpy(ragged.visible[rows]).to(device, torch.int64)


def _padded(
    spans: tuple[SequenceSpan, ...], block_elements: int, device: torch.device
) -> PaddedDecode | None:
    """The sequences of one token, where attending to them at once is cheaper."""
    single = [span for span in spans if span.end - span.begin == 1]
    width = max((span.blocks.shape[0] for span in single), default=0)
    too_much = device.type == "cpu" and width * len(single) * block_elements > PADDED_ELEMENTS
    if len(single) < 2 or too_much:
        return None
    blocks = torch.nn.utils.rnn.pad_sequence([span.blocks for span in single], batch_first=True)
    return PaddedDecode(
        rows=torch.tensor([span.begin for span in single], device=device),
        blocks=blocks.flatten(),
        lengths=torch.tensor([span.length for span in single], device=device),
        width=width,
    )
