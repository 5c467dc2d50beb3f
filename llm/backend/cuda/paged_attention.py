"""Attention over the paged pool in one launch: chunks of prompts, prefix hits and decodes alike.

Flash attention's online softmax (Dao et al., "FlashAttention", 2022) over blocks that a table names (Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023). A program
computes one tile of query rows of one KV head, all query heads of its group folded into the rows.

Letters in shapes: T tokens, H query heads, K KV heads, G = H / K, D head_dim, N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16  # query rows of a chunk's tile
KEYS = 64  # keys of a loop's turn
_SMALLEST_DOT = 16  # rows and columns that tl.dot takes

IDLE = -1
"""The sequence of a tile that has nothing to do: padding of a bucket."""


@triton.jit
def _load_keys_values(data, scales, at, scale_at, inside, there, QUANTISED: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(data + at, mask=inside, other=0)
    if QUANTISED:
        x = x.to(tl.float32) * tl.load(scales + scale_at, mask=there, other=0.0)[:, None]
    return x


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    q, k, v, k_scales, v_scales, out, tiles, offsets, lengths, visible, tables, scale,
    table_stride, q_token, q_head, out_token, out_head, kv_head, kv_block, kv_slot, scale_head, scale_block,
    G: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    FOLDED: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    if sequence >= 0:
        begin = tl.load(tiles + 2 * tl.program_id(0) + 1)
        end, length = tl.load(offsets + sequence + 1), tl.load(lengths + sequence)
        fold, d = tl.arange(0, FOLDED), tl.arange(0, D_PAD)
        row, query_head = begin + fold // G, head * G + fold % G
        real = (fold < ROWS * G) & (row < end)
        in_head = (d < D)[None, :]
        position = length - end + row
        bound = tl.load(visible + row, mask=real, other=0)
        at = row[:, None] * q_token + query_head[:, None] * q_head + d[None, :]
        query = tl.load(q + at, mask=real[:, None] & in_head, other=0.0)
        highest = tl.full((FOLDED,), float("-inf"), tl.float32)
        total = tl.zeros((FOLDED,), tl.float32)
        sums = tl.zeros((FOLDED, D_PAD), tl.float32)
        first, last = 0, tl.max(bound, 0)
        if WINDOW > 0:
            first = tl.maximum(0, length - end + begin - WINDOW + 1) // KEYS * KEYS
        for start in range(first, last, KEYS):
            key = start + tl.arange(0, KEYS)
            there = key < last
            block = tl.load(tables + sequence * table_stride + key // BLOCK_SIZE, mask=there, other=0)
            block = block.to(tl.int64)
            kv_at = (block * kv_block + (key % BLOCK_SIZE) * kv_slot + head * kv_head)[:, None] + d[None, :]
            scale_at = block * scale_block + key % BLOCK_SIZE + head * scale_head
            inside = there[:, None] & in_head
            keys = _load_keys_values(k, k_scales, kv_at, scale_at, inside, there, QUANTISED).to(query.dtype)
            score = tl.dot(query, tl.trans(keys), input_precision="ieee").to(tl.float32) * scale
            seen = key[None, :] < bound[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, 1))
            finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weight = tl.exp(score - finite[:, None])
            shrink = tl.exp(highest - finite)
            values = _load_keys_values(v, v_scales, kv_at, scale_at, inside, there, QUANTISED)
            values = values.to(query.dtype)
            added = tl.dot(weight.to(query.dtype), values, input_precision="ieee").to(tl.float32)
            sums = sums * shrink[:, None] + added
            total = total * shrink + tl.sum(weight, 1)
            highest = new_highest
        result = sums / tl.where(total > 0, total, 1.0)[:, None]
        out_at = row[:, None] * out_token + query_head[:, None] * out_head + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real[:, None] & in_head)


@torch.library.custom_op("vlm::paged_attention", mutates_args=("out",))
def paged_attention(
    q: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    tiles: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    visible: Tensor,
    tables: Tensor,
    out: Tensor,
    window: int,
    tile_rows: int,
) -> None:
    """Attends every tile's rows to their sequences' keys.

    q, out: [T, H, D]. kv: [2, K, blocks, block_size, D], in q's type or int8 with float32 `scales`
    [2, K, blocks, block_size]. tiles: int32 [n, 2], (sequence or IDLE, first row). offsets: int32 [N + 1].
    lengths: int32 [N]: a sequence's rows are its last positions. visible: int32 [T], the keys [0, visible)
    that each row sees. tables: int32 [N, width]. window: keys that a row sees at most, itself included; 0:
    all. tile_rows: rows of a tile.
    """
    heads, dim = q.shape[1], q.shape[2]
    group = heads // kv.shape[1]
    quantised = scales is not None
    pair = scales if scales is not None else kv
    arguments: tuple[Any, ...] = (
        q, kv[0], kv[1], pair[0], pair[1], out, tiles, offsets, lengths, visible, tables, dim**-0.5,
        tables.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        kv.stride(1), kv.stride(2), kv.stride(3), pair.stride(1), pair.stride(2),
    )  # fmt: skip
    _attend_tile[(tiles.shape[0], kv.shape[1])](
        *arguments,
        G=group,
        BLOCK_SIZE=kv.shape[3],
        D=dim,
        D_PAD=max(_SMALLEST_DOT, triton.next_power_of_2(dim)),
        ROWS=tile_rows,
        FOLDED=max(_SMALLEST_DOT, triton.next_power_of_2(tile_rows * group)),
        KEYS=KEYS,
        WINDOW=window,
        QUANTISED=quantised,
    )


@paged_attention.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    tiles: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    visible: Tensor,
    tables: Tensor,
    out: Tensor,
    window: int,
    tile_rows: int,
) -> None:
    on = [q, kv, tiles, offsets, lengths, visible, tables, out, *([] if scales is None else [scales])]
    torch._check(len({x.device for x in on}) == 1, lambda: "paged_attention's tensors are on several devices")
    torch._check(q.dtype == out.dtype, lambda: "paged_attention's out must be of q's type")
    torch._check(scales is not None or kv.dtype == q.dtype, lambda: "the pool must be of q's type")
