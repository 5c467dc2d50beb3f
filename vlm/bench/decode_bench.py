"""`vlm bench decode`: the decoder alone, one thread, beside transformers and the memory's read bandwidth.

Time is the process's CPU time, since machines are shared; ours and theirs take turns, step for step over the
same context. Two checkpoints: the default model (fits in the cache) and one of SmolLM2-135M's shape with
random weights (read from memory on every step).
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm.backend.base import Backend, StepItem, StepPlan
from llm.backend.native_build import load_library
from llm.cost import kv_block_bytes
from llm.decoder_config import DecoderConfig
from llm.storage import KvStorage
from vlm.bench.harness.results import report, result, say, spread
from vlm.checkpoint import Checkpoint
from vlm.config import DEFAULT_MODEL as DEFAULT_PATH
from vlm.loading import load_backend

DEFAULT_MODEL = Path(DEFAULT_PATH)
BLOCK = 16
CONTEXT = 128  # tokens in the cache when batch 1 starts
LONG_CONTEXT = 1024  # of each of eight streams: a page of tiles and a question
STEPS = 12  # per round
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


class Streams:
    """`batch` sequences that decode greedily on one of our backends."""

    def __init__(self, backend: Backend, batch: int, context: int) -> None:
        self._backend = backend
        width = -(-(context + 4096) // BLOCK)
        width = min(width, backend.num_blocks // batch, backend.max_positions // BLOCK)
        self._tables = [tuple(range(i * width, (i + 1) * width)) for i in range(batch)]
        self._first, self.position = context, context
        prompts = [tuple((7 * i + j) % 500 for j in range(context)) for i in range(batch)]
        items = [StepItem(p, 0, t, 1) for p, t in zip(prompts, self._tables, strict=True)]
        self._first_tokens = [int(backend.execute(StepPlan((item,))).argmax()) for item in items]
        self.tokens = self._first_tokens

    def restart(self) -> None:
        """Back to the end of the prompts."""
        self.position, self.tokens = self._first, self._first_tokens

    def step(self) -> None:
        items = zip(self.tokens, self._tables, strict=True)
        plan = StepPlan(tuple(StepItem((token,), self.position, table, 1) for token, table in items))
        self.tokens = self._backend.execute(plan).argmax(1).tolist()
        self.position += 1


class Peer:
    """transformers on the same directory, with its own cache, batch 1."""

    def __init__(self, directory: Path, dtype: torch.dtype, is_vlm: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # its newer name: cache
        loader = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
        self._model = loader.from_pretrained(directory, dtype=dtype).eval()
        self.restart()

    @torch.inference_mode()
    def restart(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache()
        self._advance(torch.arange(CONTEXT)[None] % 500)

    @torch.inference_mode()
    def step(self) -> None:
        self._advance(self.token)

    def _advance(self, ids: torch.Tensor) -> None:
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)


def cpu_seconds_per_step(step: Callable[[], None], steps: int = STEPS) -> float:
    started = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - started) / steps


def read_bandwidth(rounds: int) -> list[float]:
    """Bytes per CPU second of one thread that reads 256 MB in eight streams and keeps nothing.

    Raises NativeUnavailable: one stream alone, which is what torch offers, gives a third less.
    """
    read_all = load_library().read_all
    read_all.argtypes, read_all.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_float
    data = torch.ones(64 << 20)
    rates = []
    for _ in range(rounds + 1):
        started = time.process_time()
        read_all(data.data_ptr(), data.numel())
        rates.append(data.nbytes / (time.process_time() - started))
    return rates[1:]


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
    directory: Path, model: str, suffix: str, bits: str, rounds: int, is_vlm: bool
) -> dict[str, Any]:
    """Batch 1: CPU time per token of both, and our share of the read bandwidth where weights exceed the
    cache. In 16 bits the opponent is transformers' faster one of bfloat16 and float16."""
    config = Checkpoint.read(directory).decoder
    dtype, peer_dtypes = ("float32", (torch.float32,)) if bits == "fp32" else ("bfloat16", HALVES)
    blocks = (CONTEXT + STEPS * 2) // BLOCK + 2
    backend = load_backend(directory, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
    peers = {str(d).removeprefix("torch."): Peer(directory, d, is_vlm) for d in peer_dtypes}
    turns = take_turns(Streams(backend, 1, CONTEXT), peers, rounds)
    ratios = [t / o for t, o in zip(turns.theirs[turns.best], turns.ours, strict=True)]
    about = {"model": model, "dtype": dtype, "threads": 1, "batch": 1, "context": CONTEXT}
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
    moved = bytes_per_step(backend, config, 1, CONTEXT, "float32" if bits == "fp32" else "bfloat16")
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


def run(quick: bool = False) -> dict[str, Any]:
    """The names without a suffix are those of SmolLM2-135M's shape."""
    torch.set_num_threads(1)
    rounds = 2 if quick else 7
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
    return report("decode", results)
