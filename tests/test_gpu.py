"""On a CUDA device: the same answers as on the CPU. `make test-gpu` runs these; elsewhere they skip."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import execute, ids_of, random_decoder, relative_error, run_chunks

from llm.backend.base import StepItem, StepPlan
from llm.request import SamplingParams
from vlm.build import build_local_pipeline
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.loading import load_backend, load_encoder
from vlm.pipeline import ChatMessage, ImageInput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]
DEVICE = "cuda"
SHAPES = ("llama_group3_llama3_rope", "qwen3_attention_bias", "mistral_sliding")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-3), ("bfloat16", 5e-2)])
def test_chunks_decodes_and_graphs_give_the_logits_of_the_cpu(
    tmp_path: Path, shape: str, dtype: str, bound: float
) -> None:
    path, _ = random_decoder(tmp_path, shape)
    want_of = load_backend(path, num_blocks=24, backend="torch")
    got_of = load_backend(path, num_blocks=24, device=DEVICE, dtype=dtype)
    ids, table = ids_of(0, 60), (3, 9, 1, 20)
    want = run_chunks(want_of, ids, table, [40, 1, 1, 18])
    assert relative_error(run_chunks(got_of, ids, table, [40, 1, 1, 18]), want) <= bound
    for position in range(20, 24):  # many sequences that decode: a bucket with padding
        items = tuple(StepItem((ids[position],), position, table, 1) for _ in range(1))
        others = tuple(StepItem((5,), 0, (block,), 1) for block in (11, 12, 13, 14))
        plan = StepPlan(items + others)
        assert relative_error(execute(got_of, plan), execute(want_of, plan)) <= bound


def test_captured_forwards_give_the_visual_tokens_of_the_cpu() -> None:
    encoder = load_encoder(DEFAULT_MODEL, device=DEVICE)
    side = encoder.config.geometry.image_size
    tiles = np.random.default_rng(0).integers(0, 256, (5, side, side, 3), np.uint8)
    want = load_encoder(DEFAULT_MODEL).encode([tiles])[0]
    got = encoder.encode([tiles])[0].cpu()
    assert float((got - want).norm() / want.norm()) < 5e-3


def test_answers_are_those_of_the_cpu() -> None:
    invoice = (Path(__file__).parent.parent / "vlm/samples/invoice.png").read_bytes()
    questions = ("What is the total?", "What is the date?", "Read the text.")

    async def ask(device: str) -> list[str]:
        pipeline = build_local_pipeline(EngineOptions(device=device, kv_cache_mb=64))
        await pipeline.start()
        try:
            answers = []
            for question in questions:
                message = ChatMessage("user", (ImageInput(invoice), question))
                prepared = pipeline.prepare("r", [message], SamplingParams(max_tokens=80))
                answers.append((await pipeline.answer(prepared)).choices[0].text)
            return answers
        finally:
            await pipeline.close()

    assert asyncio.run(ask(DEVICE)) == asyncio.run(ask("cpu"))
