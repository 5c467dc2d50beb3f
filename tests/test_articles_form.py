"""The articles' configuration end to end: open_clip tower, 12 + 1 tiles, 2x2 average pooling, GQA decoder."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fidelity import DEFAULT_MODEL
from PIL import Image

from encoder import openclip
from encoder.encoder_config import TowerConfig
from llm.request import Delta, Finished, SamplingParams
from preprocess.limits import ImageLimits
from preprocess.stage import preprocess
from vlm.build import build_encoder, build_local_pipeline
from vlm.config import EngineOptions
from vlm.model_source import ModelSource
from vlm.pipeline import ChatMessage, ImageInput
from vlm.spec import ModelSpec

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
REPO = "timm/narrow"
NAME = "ViT-SO400M-14-SigLIP-384"


def decoder_directory(path: Path) -> Path:
    """A small Qwen2 decoder with random weights and the default model's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=626,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    shutil.copy(DEFAULT_MODEL / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def narrow_tower(monkeypatch: pytest.MonkeyPatch) -> str:
    """SO400M/14-384's shape with 1/18 of its width and two of its layers."""
    index = openclip.index()
    monkeypatch.setitem(index.trunks, "narrow", TowerConfig(64, 2, 4, 96, 384, 14, "gelu"))
    monkeypatch.setitem(index.towers, "narrow", openclip.NamedTower("narrow", {"some-tag": REPO}))
    return "narrow"


def photo(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_twelve_tiles_and_a_thumbnail_are_2548_tokens_from_the_header_and_in_the_run(
    tmp_path: Path, narrow_tower: str
) -> None:
    """27x27 patches pool to 14x14 = 196 tokens a tile; 13 tiles."""
    model = f"open_clip:{narrow_tower}:{decoder_directory(tmp_path)}"
    data = photo(1600, 1200)
    pipeline = build_local_pipeline(EngineOptions(model=model, kv_cache_mb=64))
    assert (pipeline.plan_image(ImageInput(data)).grid.num_tiles, pipeline.spec.geometry.tokens_per_tile) == (
        13,
        196,
    )

    async def main() -> list[tuple[str, int, int]]:
        await pipeline.start()
        answers = []
        try:
            for number, question in enumerate(("What is it?", "And what else?")):
                message = ChatMessage("user", (ImageInput(data), question))
                params = SamplingParams(max_tokens=8, ignore_eos=True)
                text = ""
                async for event in pipeline.run(pipeline.prepare(f"r{number}", [message], params)):
                    match event:
                        case Delta():
                            text += event.text
                        case Finished(usage=usage):
                            answers.append((text, usage.image_tokens, usage.cached_tokens))
                        case other:
                            raise AssertionError(other)
        finally:
            await pipeline.close()
        return answers

    cold, warm = asyncio.run(main())
    assert cold[1] == warm[1] == 13 * 196 == pipeline.plan_image(ImageInput(data)).num_tokens
    assert cold[2] == 0 and warm[2] >= 13 * 196 - 16


def test_an_image_in_the_prompt_reaches_the_decoder_as_its_visual_tokens(
    tmp_path: Path, narrow_tower: str
) -> None:
    """The prompt's image positions, embedded by hand, give `transformers`' own next token."""
    from transformers import AutoModelForCausalLM

    directory = decoder_directory(tmp_path)
    model = f"open_clip:{narrow_tower}:{directory}"
    data = photo(500, 900)
    options = EngineOptions(model=model, kv_cache_mb=64)
    pipeline = build_local_pipeline(options)
    message = ChatMessage("user", ("Look: ", ImageInput(data), " What is it?"))
    prepared = pipeline.prepare("r", [message], SamplingParams(max_tokens=6, ignore_eos=True))

    async def main() -> list[int]:
        await pipeline.start()
        try:
            ids: list[int] = []
            async for event in pipeline.run(prepared):
                if isinstance(event, Delta):
                    ids.extend(event.token_ids)
            return ids
        finally:
            await pipeline.close()

    answer = asyncio.run(main())
    tiles = preprocess(data, pipeline.spec.preprocess_spec("auto"), ImageLimits())
    (visual,) = build_encoder(ModelSource.parse(model), options).encode([tiles.pixels])
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([[*prepared.prompt.token_ids, *answer]])
    with torch.inference_mode():
        embeddings = reference.get_input_embeddings()(ids).clone()
        for span in prepared.prompt.spans:
            embeddings[0, span.start : span.start + span.length] = visual[
                span.offset : span.offset + span.length
            ]
        logits = reference(inputs_embeds=embeddings).logits[0, -len(answer) - 1 : -1]
    for row, token in zip(logits, answer, strict=True):
        top = row.topk(2)
        assert int(top.indices[0]) == token or float(top.values[0] - top.values[1]) < 1e-3


def test_the_real_towers_tokens_are_counted_without_loading_it(tmp_path: Path) -> None:
    spec = ModelSpec.load(f"open_clip:{NAME}:{decoder_directory(tmp_path)}")
    assert spec.geometry.tokens_per_tile == 196
    assert spec.image_prompt_tokens(spec.preprocess.rule.grid(1600, 1200)) == 13 * 196
