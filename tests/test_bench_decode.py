"""The decode benchmark compares like with like, and its document has the agreed form."""

from __future__ import annotations

import pytest
import torch

from llm.backend.native_build import why_unavailable
from vlm.bench.decode_bench import DEFAULT_MODEL, against_transformers, batch8, gemma3
from vlm.bench.decoding.span_stalls import span_stalls
from vlm.bench.decoding.steps import BLOCK, CONTEXT, Peer, Streams
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


SMALL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_the_slice_of_gemma_3_is_measured_in_every_storage() -> None:
    results = gemma3(1, **SMALL)
    stored = {"fp32": "float32", "16bit": "bfloat16", "int8": "int8", "int4": "int4"}
    for bits, dtype in stored.items():
        figure = results[f"decode_over_transformers_{bits}_gemma3"]
        assert figure["value"] > 0 and figure["dtype"] == dtype
    assert len(results) == 4  # so small a slice is read from a cache, not from memory


@pytest.mark.slow
def test_a_span_and_as_many_tokens_of_text_arrive_beside_decodes() -> None:
    """The bench's own bound for the span: a decode step, and all of it at once."""
    results = span_stalls(1, **SMALL)
    assert set(results) == {"itl_max_over_p50_span", "itl_max_over_p50_text"}
    for figure in results.values():
        assert figure["arriving_tokens"] == 258 and figure["value"] >= 1 and figure["alone_over_p50"] > 1
