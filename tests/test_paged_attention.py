"""One kernel attends as the torch backend does, whatever the shapes. Triton interprets it without a GPU."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llm.backend.cuda.paged_attention import IDLE, paged_attention
from llm.backend.cuda.step_batch import tiles_of
from llm.backend.kv_pool import LayerKv, quantise_heads
from llm.backend.span_attention import attend_span

BOUND = 1e-5


def pool_of(rng: torch.Generator, *shape: int, int8: bool) -> LayerKv:
    """shape: K, blocks, block size, D."""
    data = torch.randn(2, *shape, generator=rng)
    if not int8:
        return LayerKv(data, None, torch.float32)
    values, scales = quantise_heads(data)
    return LayerKv(values, scales, torch.float32)


@settings(deadline=None, max_examples=25, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
@given(
    chunks=st.lists(st.tuples(st.integers(1, 37), st.integers(0, 90)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4]),
    dim=st.sampled_from([8, 16, 48, 64]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 1, 7, 40, 64]),
    int8=st.booleans(),
    spans=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_is_that_of_the_torch_backend_on_any_shapes(
    chunks: list[tuple[int, int]], kv_heads: int, group: int, dim: int, block_size: int,
    window: int, int8: bool, spans: bool, seed: int,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    counts = [count for count, _ in chunks]
    lengths = [count + before for count, before in chunks]
    widths = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(widths) + 3, generator=rng)
    kv = pool_of(rng, kv_heads, len(order), block_size, dim, int8=int8)
    tables = torch.zeros(len(chunks), max(widths), dtype=torch.int32)
    visible, at = [], 0
    for i, width in enumerate(widths):
        tables[i, :width] = order[at : at + width]
        at += width
        own = torch.arange(lengths[i] - counts[i], lengths[i]) + 1
        if spans:  # the chunk's later half sees itself whole
            own[counts[i] // 2 :] = lengths[i]
        visible.append(own)
    q = torch.randn(sum(counts), kv_heads * group, dim, generator=rng)
    tile_rows = 1 if max(counts) == 1 else 16
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tiles = np.concatenate([tiles_of(offsets, tile_rows), [[IDLE, 0]]]).astype(np.int32)
    out = torch.full_like(q, torch.nan)
    paged_attention(
        q, kv.data, kv.scales, torch.from_numpy(tiles), torch.from_numpy(offsets),
        torch.tensor(lengths, dtype=torch.int32), torch.cat(visible).int(), tables, out, window, tile_rows,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        k, v = kv.gather(tables[i, : widths[i]].long())
        want = attend_span(q[rows], k[:, :length], v[:, :length], window, visible[i])
        got = out[rows].flatten(1)
        assert float((got - want).abs().max()) <= BOUND * max(1.0, float(want.abs().max()))
