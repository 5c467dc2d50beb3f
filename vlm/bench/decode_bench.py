"""`vlm bench decode`: the decoder alone, one thread, beside transformers and the memory's read bandwidth.

Time is the process's CPU time, since machines are shared; ours and theirs take turns, step for step over the
same context. Two checkpoints: the default model (fits in the cache) and one of SmolLM2-135M's shape with
random weights (read from memory on every step). Part gemma3: a slice of Gemma 3 4B's layers, by storage.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm.backend.base import Backend
from llm.cost import kv_block_bytes
from llm.decoder_config import DecoderConfig
from llm.storage import KvStorage, WeightOption
from vlm.bench.decoding.gemma3_slice import MODEL as GEMMA3
from vlm.bench.decoding.gemma3_slice import gemma3_slice
from vlm.bench.decoding.steps import (
    BLOCK,
    CONTEXT,
    STEPS,
    Peer,
    Streams,
    cpu_seconds_per_step,
    read_bandwidth,
)
from vlm.bench.harness.results import report, result, say, spread
from vlm.checkpoint import Checkpoint
from vlm.config import DEFAULT_MODEL as DEFAULT_PATH
from vlm.loading import load_backend

DEFAULT_MODEL = Path(DEFAULT_PATH)
LONG_CONTEXT = 1024  # of each of eight streams: a page of tiles and a question
CACHE_BYTES = (
    64 << 20
)  # beneath it, the bytes of a step come from a cache, and the memory's rate is not the limit
HALVES = (torch.bfloat16, torch.float16)
SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def bytes_per_step(backend: Backend, config: DecoderConfig, batch: int, context: int, kv: KvStorage) -> float:
    """Weights once, the KV of every sequence once."""
    read = kv_block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, context * batch, kv)
    return backend.weight_bytes + read  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class DecodeTurns:
    """CPU seconds per token of both, and bytes per CPU second read beside them, by round."""

    ours: list[float]
    theirs: dict[str, list[float]]  # by the opponent's dtype
    bandwidth: list[float]

    @property
    def best(self) -> str:
        return min(self.theirs, key=lambda dtype: statistics.median(self.theirs[dtype]))


def take_turns(streams: Streams, peers: dict[str, Peer], rounds: int) -> DecodeTurns:
    turns = DecodeTurns([], {dtype: [] for dtype in peers}, [])
    for number in range(rounds + 1):  # the first one warms up
        streams.restart()
        ours = cpu_seconds_per_step(streams.step)
        theirs = {}
        for dtype, peer in peers.items():
            peer.restart()
            theirs[dtype] = cpu_seconds_per_step(peer.step)
        if number:
            turns.ours.append(ours)
            turns.bandwidth.append(max(read_bandwidth(2)))
            for dtype, seconds in theirs.items():
                turns.theirs[dtype].append(seconds)
    return turns


def against_transformers(
    directory: Path,
    model: str,
    suffix: str,
    bits: str,
    rounds: int,
    is_vlm: bool,
    weights: WeightOption = "auto",
    peer_dtypes: Sequence[torch.dtype] | None = None,
) -> dict[str, Any]:
    """Batch 1: CPU time per token of both, and our share of the read bandwidth where weights exceed the
    cache. In 16 bits the opponent is transformers' faster one of bfloat16 and float16, which other
    `peer_dtypes` replace."""
    config = Checkpoint.read(directory).decoder
    dtype = "bfloat16" if bits == "16bit" else "float32"
    peer_dtypes = peer_dtypes or (HALVES if bits == "16bit" else (torch.float32,))
    blocks = (CONTEXT + STEPS * 2) // BLOCK + 2
    backend = load_backend(directory, num_blocks=blocks, block_size=BLOCK, dtype=dtype, weights=weights)
    peers = {str(d).removeprefix("torch."): Peer(directory, d, is_vlm) for d in peer_dtypes}
    turns = take_turns(Streams(backend, 1, CONTEXT), peers, rounds)
    ratios = [t / o for t, o in zip(turns.theirs[turns.best], turns.ours, strict=True)]
    stored = dtype if weights == "auto" else weights
    about = {"model": model, "dtype": stored, "threads": 1, "batch": 1, "context": CONTEXT}
    results = {
        f"decode_over_transformers_{bits}{suffix}": result(
            statistics.median(ratios),
            "x",
            **about,
            ours_ms=statistics.median(turns.ours) * 1e3,
            theirs_ms=statistics.median(turns.theirs[turns.best]) * 1e3,
            opponent_dtype=turns.best,
            backend=type(backend).__name__,
            spread=spread(ratios),
        )
    }
    moved = bytes_per_step(backend, config, 1, CONTEXT, "bfloat16" if bits == "16bit" else "float32")
    if moved > CACHE_BYTES:
        used = [moved / seconds / limit for seconds, limit in zip(turns.ours, turns.bandwidth, strict=True)]
        results[f"mbu_b1_{bits}{suffix}"] = result(
            statistics.median(used),
            "fraction",
            **about,
            read_bandwidth_gb_s=statistics.median(turns.bandwidth) / 1e9,
            bytes_per_step=moved,
            tokens_per_cpu_s=1 / statistics.median(turns.ours),
            spread=spread(used),
        )
    return results


def batch8(directory: Path, model: str, suffix: str, rounds: int, context: int) -> dict[str, Any]:
    """Eight streams, aggregate tokens per CPU second, at both storages."""
    config = Checkpoint.read(directory).decoder
    context = min(context, config.max_positions - 2 * STEPS)
    blocks = 8 * ((context + 2 * STEPS) // BLOCK + 1)
    results = {}
    for dtype, name in (("bfloat16", ""), ("float32", "_fp32")):
        backend = load_backend(directory, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
        streams = Streams(backend, 8, context)
        rates = []
        for number in range(rounds + 1):
            streams.restart()
            seconds = cpu_seconds_per_step(streams.step)
            if number:
                rates.append(8 / seconds)
        results[f"batch8_tokens_per_cpu_s{name}{suffix}"] = result(
            statistics.median(rates),
            "tokens/s",
            model=model,
            dtype=dtype,
            threads=1,
            batch=8,
            context=context,
            per_user_tokens_per_cpu_s=statistics.median(rates) / 8,
            backend=type(backend).__name__,
            spread=spread(rates),
        )
    return results


@contextmanager
def smollm2_checkpoint() -> Iterator[Path]:
    """A float32 checkpoint of SmolLM2-135M's shape in a temporary directory, 538 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(torch.float32).save_pretrained(directory)
        yield Path(directory)


def gemma3(rounds: int, **changes: Any) -> dict[str, Any]:
    """Weights of 32, 16, 8 and 4 bits. Beside 8 and 4, which transformers has not by itself, stands its
    fastest of the others. `changes`: of the slice's config."""
    results: dict[str, Any] = {}
    storages: tuple[tuple[str, WeightOption], ...] = (
        ("fp32", "float32"),
        ("16bit", "auto"),
        ("int8", "int8"),
        ("int4", "int4"),
    )
    peers: Sequence[torch.dtype] | None = None
    with gemma3_slice(**changes) as directory:
        for bits, weights in storages:
            say(f"decode: {GEMMA3}, beside transformers, {bits}")
            results |= against_transformers(
                directory, GEMMA3, "_gemma3", bits, rounds, is_vlm=False, weights=weights, peer_dtypes=peers
            )
            if bits == "16bit":
                told = [results[f"decode_over_transformers_{bits}_gemma3"] for bits in ("fp32", "16bit")]
                fastest = min(told, key=lambda figure: figure["theirs_ms"])
                peers = (getattr(torch, fastest["opponent_dtype"]),)
    return results


def run(quick: bool = False, parts: Sequence[str] = ("small",)) -> dict[str, Any]:
    torch.set_num_threads(1)
    rounds = 2 if quick else 7
    results: dict[str, Any] = {}
    if "small" in parts:
        results |= small(rounds)
    if "gemma3" in parts:
        results |= gemma3(min(rounds, 3))
    return report("decode", results)


def small(rounds: int) -> dict[str, Any]:
    """The names without a suffix are those of SmolLM2-135M's shape."""
    results: dict[str, Any] = {}
    for bits in ("fp32", "16bit"):
        say(f"decode: the default model beside transformers, {bits}")
        results |= against_transformers(
            DEFAULT_MODEL, "vlm-default", "_default_model", bits, rounds, is_vlm=True
        )
    say("decode: the default model, batches of 8")
    results |= batch8(DEFAULT_MODEL, "vlm-default", "_default_model", rounds, LONG_CONTEXT)
    with smollm2_checkpoint() as directory:
        model = "SmolLM2-135M shape, random"
        for bits in ("fp32", "16bit"):
            say(f"decode: {model}, beside transformers, {bits}")
            results |= against_transformers(directory, model, "", bits, rounds, is_vlm=False)
        say(f"decode: {model}, batches of 8")
        results |= batch8(directory, model, "", rounds, LONG_CONTEXT)
        results |= batch8(directory, model, "_short_context", rounds, CONTEXT)
    return results
