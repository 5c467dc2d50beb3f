"""The decode benchmark compares like with like, and its document has the agreed form."""

from __future__ import annotations

import pytest
import torch

from llm.backend.native_build import why_unavailable
from vlm.bench.decode_bench import BLOCK, CONTEXT, DEFAULT_MODEL, Peer, Streams, against_transformers, batch8
from vlm.loading import load_backend


def test_both_sides_decode_the_same_tokens() -> None:
    streams = Streams(load_backend(DEFAULT_MODEL, num_blocks=16, block_size=BLOCK), 1, CONTEXT)
    peer = Peer(DEFAULT_MODEL, torch.float32, is_vlm=True)
    for _ in range(2):  # a restart begins the same text again
        tokens = []
        for _ in range(10):
            streams.step()
            peer.step()
            assert streams.tokens == peer.token.flatten().tolist()
            tokens += streams.tokens
        streams.restart()
        peer.restart()
    assert streams.position == CONTEXT


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_every_figure_says_its_circumstances() -> None:
    results = against_transformers(DEFAULT_MODEL, "m", "_x", "fp32", 1, is_vlm=True)
    results |= batch8(DEFAULT_MODEL, "m", "_x", 1, 64)
    assert set(results) == {
        "decode_over_transformers_fp32_x",
        "batch8_tokens_per_cpu_s_x",
        "batch8_tokens_per_cpu_s_fp32_x",
    }
    for entry in results.values():
        assert entry["value"] > 0
        assert {"unit", "model", "dtype", "threads", "batch", "context", "spread"} <= set(entry)
