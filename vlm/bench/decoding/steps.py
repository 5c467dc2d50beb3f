"""Decode steps of one of our backends and of transformers, and how fast the memory is read beside them."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from llm.backend.base import Backend, StepItem, StepPlan, greedy
from llm.backend.native_build import load_library

BLOCK = 16
CONTEXT = 128  # tokens in the cache when batch 1 starts
STEPS = 12  # per round


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
        self._first_tokens = [int(greedy(backend.execute(StepPlan((item,))))[0][0]) for item in items]
        self.tokens = self._first_tokens

    def restart(self) -> None:
        """Back to the end of the prompts."""
        self.position, self.tokens = self._first, self._first_tokens

    def step(self) -> None:
        items = zip(self.tokens, self._tables, strict=True)
        plan = StepPlan(tuple(StepItem((token,), self.position, table, 1) for token, table in items))
        self.tokens = greedy(self._backend.execute(plan))[0].tolist()
        self.position += 1


class Peer:
    """transformers on the same directory, with its own cache, batch 1."""

    token: torch.Tensor  # the latest, [1, 1]

    def __init__(self, directory: Path, dtype: torch.dtype, is_vlm: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # its newer name: cache
        loader = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
        self._model = loader.from_pretrained(directory, dtype=dtype).eval()
        self._read_prompt()

    @torch.inference_mode()
    def _read_prompt(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache()
        self._advance(torch.arange(CONTEXT)[None] % 500)
        self._first_token = self.token

    def restart(self) -> None:
        """Back to the end of the prompt."""
        if surplus := self._cache.get_seq_length() - CONTEXT:
            self._cache.crop(-surplus)
        self.token = self._first_token

    @torch.inference_mode()
    def step(self) -> None:
        self._advance(self.token)

    def _advance(self, ids: torch.Tensor) -> None:
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)


def cpu_seconds_per_step(step: Callable[[], None], steps: int = STEPS) -> float:
    """Of so many steps, and more until the clock has moved: some stand still for milliseconds."""
    started, count = time.process_time(), 0
    while count < steps or time.process_time() == started:
        step()
        count += 1
    return (time.process_time() - started) / count


def read_bandwidth(rounds: int) -> list[float]:
    """Bytes per CPU second of one thread that reads 256 MB in eight streams and keeps nothing.

    Raises NativeUnavailable: one stream alone, which is what torch offers, gives a third less.
    """
    read_all = load_library().read_all
    read_all.argtypes, read_all.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_float
    data = torch.ones(64 << 20)
    rates = []
    for _ in range(rounds + 1):
        seconds = cpu_seconds_per_step(lambda: read_all(data.data_ptr(), data.numel()), 1)
        rates.append(data.nbytes / seconds)
    return rates[1:]
