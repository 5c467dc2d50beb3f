"""`vlm bench gpu`: what needs a CUDA device, in one run: tower, prefill, decode, first tokens.

A SmolVLM-256M-shaped checkpoint with random weights, bfloat16, wall time with the device waited for; beside
transformers on the same directory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llm.backend.base import Backend, StepItem, StepPlan
from vlm.bench.decoding.steps import BLOCK, Streams
from vlm.bench.harness.engine_load import Driver
from vlm.bench.harness.results import in_turn, report, result, spread
from vlm.bench.peers_bench import Interview
from vlm.build import build_runner, check_device
from vlm.config import EngineOptions
from vlm.loading import load_backend, load_encoder
from vlm.plan.machine.rates import gemm_rate
from vlm.plan.machine.synthetic import SMOLVLM_256M, Sizes, write_checkpoint
from vlm.spec import ModelSpec

BATCHES = (1, 8, 64, 256)
CONTEXT = 512  # of each decoding sequence
PROMPT = 2048
TILES = 13  # of a page
PAGES = 8


def run(quick: bool = False, device: str = "cuda", sizes: Sizes = SMOLVLM_256M) -> dict[str, Any]:
    """Raises SettingsError where torch finds no such device."""
    check_device(device)
    rounds = 3 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        name = "SmolVLM-256M shape" if sizes == SMOLVLM_256M else "small random"
        bench = _Bench(write_checkpoint(Path(folder) / "model", sizes), name, device, rounds)
        results = in_turn(
            "gpu",
            {
                "tower": bench.tower,
                "prefill": bench.prefill,
                **{f"decode at {batch}": partial(bench.decode, batch) for batch in BATCHES},
                "first tokens": bench.first_tokens,
                "transformers": bench.transformers,
            },
        )
    return report("gpu", results)


class _Bench:
    def __init__(self, directory: Path, name: str, device: str, rounds: int) -> None:
        self._directory = directory
        self._device = device
        self._rounds = rounds
        on_gpu = device.startswith("cuda")
        self._about = {
            "model": name,
            "dtype": "bfloat16",
            "device": torch.cuda.get_device_name(device) if on_gpu else device,
        }

    def tower(self) -> dict[str, Any]:
        encoder = load_encoder(self._directory, device=self._device, dtype=torch.bfloat16)
        side = encoder.config.geometry.image_size
        page = np.random.default_rng(0).integers(0, 256, (TILES, side, side, 3), np.uint8)
        seconds = self._seconds(lambda: encoder.encode([page] * PAGES))
        rate = PAGES / statistics.median(seconds)
        share = encoder.flops(page) * rate / gemm_rate(self._device, 3)
        return {
            "tower_images_per_s": self._result(rate, "images/s", seconds, tiles=TILES, images=PAGES),
            "tower_share_of_gemm_peak": self._result(share, "fraction", seconds, tiles=TILES, images=PAGES),
        }

    def prefill(self) -> dict[str, Any]:
        length = min(PROMPT, ModelSpec.load(self._directory).context_length - BLOCK)
        backend = self._backend(1, length)
        item = StepItem(tuple(i % 500 for i in range(length)), 0, tuple(range(-(-length // BLOCK))), 1)
        seconds = self._seconds(lambda: backend.execute(StepPlan((item,))))
        rate = length / statistics.median(seconds)
        return {"prefill_tokens_per_s": self._result(rate, "tokens/s", seconds, context=length)}

    def decode(self, batch: int) -> dict[str, Any]:
        steps = (self._rounds + 1) * 8
        context = min(CONTEXT, ModelSpec.load(self._directory).context_length // 2)
        streams = Streams(self._backend(batch, context + steps), batch, context)

        def eight_steps() -> None:
            for _ in range(8):
                streams.step()

        seconds = [s / 8 for s in self._seconds(eight_steps)]
        rate = batch / statistics.median(seconds)
        return {
            f"decode_tokens_per_s_b{batch}": self._result(
                rate, "tokens/s", seconds, batch=batch, context=context
            )
        }

    def first_tokens(self) -> dict[str, Any]:
        options = EngineOptions(
            model=str(self._directory), device=self._device, dtype="bfloat16", kv_cache_mb=1500
        )
        interview = Interview(Driver(ModelSpec.load(self._directory), build_runner(options)))
        interview.ask(["Warm up."], 1)
        cold = [self._wall(lambda: interview.ask_anew("What is the total?"))]
        warm = self._seconds(lambda: interview.ask(["Read the text of line two."], 1))
        return {
            "cold_ttft_ms": self._result(cold[0] * 1e3, "ms", cold, tiles=TILES),
            "warm_ttft_ms": self._result(statistics.median(warm) * 1e3, "ms", warm, tiles=TILES),
        }

    def transformers(self) -> dict[str, Any]:
        """A prompt of the tower's and prefill's lengths through transformers' own classes."""
        from transformers import AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForImageTextToText.from_pretrained(self._directory, dtype=torch.bfloat16)
        model = model.to(self._device).eval()
        side = model.config.vision_config.image_size
        pixels = torch.randn(1, TILES, 3, side, side, device=self._device, dtype=torch.bfloat16)
        length = min(PROMPT, ModelSpec.load(self._directory).context_length - BLOCK)
        ids = torch.arange(length, device=self._device)[None] % 500

        @torch.inference_mode()
        def tower() -> None:
            model.model.get_image_features(pixels)

        @torch.inference_mode()
        def prefill() -> None:
            model.model.text_model(input_ids=ids, use_cache=True)

        towers, prefills = self._seconds(tower), self._seconds(prefill)
        return {
            "transformers_tower_images_per_s": self._result(
                1 / statistics.median(towers), "images/s", towers, tiles=TILES, images=1
            ),
            "transformers_prefill_tokens_per_s": self._result(
                length / statistics.median(prefills), "tokens/s", prefills, context=length
            ),
        }

    def _backend(self, batch: int, length: int) -> Backend:
        blocks = batch * (-(-(length + BLOCK) // BLOCK) + 1)
        return load_backend(
            self._directory,
            num_blocks=blocks,
            block_size=BLOCK,
            device=self._device,
            dtype="bfloat16",
            backend="torch",
            attention="triton",
        )

    def _wall(self, function: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        function()
        self._wait()
        return time.perf_counter() - started

    def _seconds(self, function: Callable[[], object]) -> list[float]:
        """Wall seconds of each round, after one that warms up."""
        return [self._wall(function) for _ in range(self._rounds + 1)][1:]

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)

    def _result(self, value: float, unit: str, seconds: list[float], **about: Any) -> dict[str, Any]:
        return result(value, unit, **self._about, **about, spread=spread(seconds))
