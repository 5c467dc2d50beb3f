"""Families whose images cost what their size says, from the HTTP API to the answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from family_checkpoints import CASES, make_checkpoint, reference
from PIL import Image

from vlm.api.app import create_app
from vlm.build import build_local_pipeline, visual_format
from vlm.caption.presets import make_question
from vlm.checkpoint import Checkpoint
from vlm.config import EngineOptions, ServeConfig
from vlm.loading import load_encoder
from vlm.spec import ModelSpec

from test_end_to_end import png  # isort: skip
from test_family_fidelity import noise  # isort: skip

NAMES = ("lighton_ocr", "qwen2_vl", "qwen2_5_vl_untied", "qwen3_vl", "paddleocr_vl", "mistral3", "pixtral")
GLM = ("glm_ocr",)
PACKED = ("llava_next_mistral", "granite_vision", "llava_onevision")
NUM_TOKENS = 12


def content(images: Sequence[Image.Image], question: str) -> list[dict[str, Any]]:
    urls = ["data:image/png;base64," + base64.b64encode(png(image)).decode() for image in images]
    return [
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": question},
    ]


@torch.no_grad()
def reference_answer(directory: Path, images: Sequence[Image.Image], question: str) -> tuple[str, int]:
    """(text, prompt tokens) of transformers' own processor and greedy `generate`."""
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    nested = Checkpoint.read(directory).config["model_type"] == "llava_onevision"
    given = [list(images)] if nested else list(images)
    inputs = processor(text=text, images=given, return_tensors="pt")
    count = inputs["input_ids"].shape[1]
    model = reference(directory)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)[0]
    return processor.tokenizer.decode(ids[count:], skip_special_tokens=True), count


@pytest.mark.parametrize("name", (*NAMES, *GLM, *PACKED))
def test_answers_over_http_equal_generate_first_cached_and_side_by_side(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    directory = make_checkpoint(case, tmp_path / name, seed=5)
    first, second = noise(150, 80, 1), noise(61, 130, 2)
    asked = [([first], "What is it?"), ([first, second], "What is it?"), ([second], "Read it.")]
    want = [reference_answer(directory, *one) for one in asked]

    async def answers() -> list[dict[str, Any]]:
        options = EngineOptions(model=str(directory), kv_cache_mb=64)
        api = create_app(build_local_pipeline(options, variant="exact"), ServeConfig())
        transport = httpx.ASGITransport(api)
        async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport) as http:

            async def ask(images: Sequence[Image.Image], question: str) -> dict[str, Any]:
                body = {"messages": [{"role": "user", "content": content(images, question)}]}
                body |= {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
                done = await http.post("http://vlm/v1/chat/completions", json=body, timeout=120)
                assert done.status_code == 200, done.text
                return dict(done.json())

            together = await asyncio.gather(*(ask(*one) for one in asked))
            return [*together, *[await ask(*one) for one in asked]]

    found = asyncio.run(answers())
    for answer, (text, count) in zip(found, want * 2, strict=True):
        assert answer["usage"]["prompt_tokens"] == count
        assert answer["choices"][0]["message"]["content"] == text.lstrip(" ")  # as the API leaves them out
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in found[3:])


def test_what_encode_workers_send_is_as_wide_as_what_the_decoder_takes(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen3_vl")
    directory = make_checkpoint(case, tmp_path / "qwen3_vl", seed=5)
    width = visual_format(EngineOptions(model=str(directory))).width
    assert (
        width == load_encoder(directory).row_width == Checkpoint.read(directory).decoder.row_width == 3 * 64
    )


def test_estimates_follow_the_cap_of_the_server(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen2_vl")
    directory = make_checkpoint(case, tmp_path / "qwen2_vl", seed=5)

    async def tokens(max_pixels: int) -> int:
        options = EngineOptions(model=str(directory), kv_cache_mb=16, max_pixels=max_pixels)
        api = create_app(build_local_pipeline(options), ServeConfig())
        transport = httpx.ASGITransport(api)
        async with api.router.lifespan_context(api), httpx.AsyncClient(transport=transport) as http:
            body = {"messages": [{"role": "user", "content": content([noise(400, 300, 1)], "x")}]}
            done = await http.post("http://vlm/v1/estimate", json=body)
            assert done.status_code == 200, done.text
            return int(done.json()["images"][0]["image_tokens"])

    assert asyncio.run(tokens(0)) == 8 * 6  # the checkpoint's own 60 cells of 14 x 14
    assert asyncio.run(tokens(20 * 14**2)) == 5 * 3


def test_presets_are_asked_in_the_words_that_a_document_model_was_taught(tmp_path: Path) -> None:
    for name, preset, words in (
        ("paddleocr_vl", "text", "OCR:"),
        ("paddleocr_vl", "table", "Table Recognition:"),
        ("paddleocr_vl", "formula", "Formula Recognition:"),
        ("paddleocr_vl", "chart", "Chart Recognition:"),
        ("lighton_ocr", "table", ""),
        ("qwen2_vl", "text", "Read the text."),
    ):
        case = next(case for case in CASES if case.name == name)
        spec = ModelSpec.load(make_checkpoint(case, tmp_path / f"{name}-{preset}", seed=5))
        asked = make_question(preset=preset).resolved(spec)
        assert (asked.prompt, asked.order) == (words, "image-first")
        assert asked.prompt_for(spec, 56).spans
        assert make_question(prompt="What is it?").resolved(spec).prompt == "What is it?"
