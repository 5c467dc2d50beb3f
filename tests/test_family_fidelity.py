"""Every family against transformers on the same directory: ids, pixels, visual tokens, logits, answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoders import relative_error
from family_checkpoints import CASES, FamilyCase, make_checkpoint, reference
from PIL import Image

from llm.backend.base import Backend, StepItem, StepPlan, VisualSlice
from llm.backend.native_build import why_unavailable
from llm.request import Prompt, VisualKey
from llm.rope_positions import rope_positions
from preprocess.stage import preprocess
from vlm.loading import load_backend, load_encoder
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec

from test_end_to_end import png  # isort: skip

BACKENDS = ("torch", *(("native",) if why_unavailable() is None else ()))
BOUND = {"torch": 1e-4, "native": 2e-4}
QUESTIONS = ("What is the total?", "  odd   spaces\n", "\n\nlines\n", "é漢字 £5", "", "at <loc_3><loc_4>:")


@dataclass
class Loaded:
    case: FamilyCase
    directory: Path
    spec: ModelSpec
    processor: Any


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    from transformers import AutoImageProcessor, AutoProcessor

    case = request.param
    directory = make_checkpoint(case, tmp_path_factory.mktemp(case.name), seed=5)
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    return Loaded(case, directory, ModelSpec.load(directory, variant="exact"), processor)


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def flat(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def chat(images: list[Image.Image], question: str, text_first: bool) -> list[dict[str, Any]]:
    parts = [{"type": "image"} for _ in images]
    text = [{"type": "text", "text": question}]
    return [{"role": "user", "content": text + parts if text_first else parts + text}]


def inputs_of(loaded: Loaded, images: list[Image.Image], question: str, text_first: bool = False) -> Any:
    text = loaded.processor.apply_chat_template(
        chat(images, question, text_first), add_generation_prompt=True
    )
    given = [images] if loaded.case.nested else images
    return loaded.processor(text=text, images=given, return_tensors="pt")


def prompt_of(
    loaded: Loaded, sizes: list[tuple[int, int]], question: str, text_first: bool = False
) -> Prompt:
    rule = loaded.spec.preprocess_spec("auto", len(sizes)).rule
    parts = [ImagePart(rule.grid(w, h, "auto"), VisualKey(str(i) * 64)) for i, (w, h) in enumerate(sizes)]
    content = (question, *parts) if text_first else (*parts, question)
    return loaded.spec.prompt_builder.build([Message("user", content)])


def random_sizes(draw: random.Random, most: int, case: FamilyCase) -> list[tuple[int, int]]:
    def side() -> int:
        return max(1, min(1024, round(2 ** draw.uniform(0, 10))))

    def size() -> tuple[int, int]:
        return next(size for size in iter(lambda: (side(), side()), None) if case.takes(*size))

    return [size() for _ in range(draw.randint(1, most))]


def check_ids(loaded: Loaded, count: int, most_images: int) -> None:
    draw = random.Random(20)
    for _ in range(count):
        sizes, question = random_sizes(draw, most_images, loaded.case), draw.choice(QUESTIONS)
        text_first = draw.random() < 0.3
        images = [flat(*size) for size in sizes]
        want = inputs_of(loaded, images, question, text_first)["input_ids"][0].tolist()
        prompt = prompt_of(loaded, sizes, question, text_first)
        assert list(prompt.token_ids) == want, (sizes, question)
        row_id = loaded.spec.image_format.row_id
        positions = [p for span in prompt.spans for p in range(span.start, span.start + span.length)]
        assert positions == [i for i, token in enumerate(want) if token == row_id]


def test_prompt_ids_equal_the_processors(loaded: Loaded) -> None:
    check_ids(loaded, 12, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prompt_ids_equal_the_processors_for_300_sizes(loaded: Loaded) -> None:
    check_ids(loaded, 300, 4)


def visual_rows(loaded: Loaded, image: Image.Image, among: int = 1) -> tuple[np.ndarray, torch.Tensor]:
    """(pixels as the tower sees them, visual tokens) of our own, in a chat of so many images."""
    encoder = load_encoder(loaded.directory)
    tiles = preprocess(png(image), loaded.spec.preprocess_spec("auto", among))
    rows = encoder.encode([tiles.pixels])[0]
    return encoder.normalise(tiles.pixels).numpy(), encoder.pack(rows, tiles.grid)


@pytest.mark.parametrize("size", [(75, 40), (40, 91), (20, 20), (7, 300)])
@torch.no_grad()
def test_pixels_and_visual_tokens_equal_transformers(loaded: Loaded, size: tuple[int, int]) -> None:
    if not loaded.case.takes(*size):
        size = (4 * size[0], size[1])
    image = noise(*size, seed=size[0])
    inputs = inputs_of(loaded, [image], "x")
    pixels, rows = visual_rows(loaded, image)
    theirs = loaded.case.pixels(inputs)
    assert np.abs(pixels - theirs.numpy().reshape(pixels.shape)).max() < 2e-6
    model = reference(loaded.directory).model
    shapes = {key: inputs[key] for key in ("image_sizes", "image_grid_thw") if key in inputs}
    found = model.get_image_features(pixel_values=inputs["pixel_values"], **shapes)
    features = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    want = torch.cat([torch.cat(list(each)).reshape(len(rows), -1) for each in features], -1)
    want = want * loaded.case.row_scale
    assert rows.shape == want.shape
    assert float((rows - want).abs().max() / want.std()) <= 1e-4


def run(
    backend: Backend, prompt: Prompt, rows: dict[VisualKey, torch.Tensor], ends: list[int], start: int = 0
) -> np.ndarray:
    """Logits at every position from `start` on, in chunks that end at `ends` or behind a whole span."""
    spans = [(span.start, span.start + span.length) for span in prompt.spans]
    if backend.whole_spans:
        behind = {position: last for first, last in spans for position in range(first + 1, last)}
        ends = list(dict.fromkeys(behind.get(end, end) for end in ends))
    table = tuple(range(-(-len(prompt.token_ids) // 16)))
    out = []
    for end in ends:
        visuals = []
        for span in prompt.spans:
            first, last = max(span.start, start), min(span.start + span.length, end)
            if first < last:
                offset = span.offset + first - span.start
                visuals.append(VisualSlice(first - start, rows[span.key][offset : offset + last - first]))
        whole = tuple(s for s in spans if start < s[1] <= end) if backend.whole_spans else ()
        rope = rope_positions(prompt.spans, start, end)
        item = StepItem(prompt.token_ids[start:end], start, table, end - start, tuple(visuals), whole, rope)
        out.append(backend.execute(StepPlan((item,))))
        start = end
    return np.concatenate(out)


@pytest.mark.parametrize("kind", BACKENDS)
@torch.no_grad()
def test_logits_equal_transformers_whole_and_in_any_chunks(loaded: Loaded, kind: str) -> None:
    sizes = [(75, 40), (30, 61)]
    images = [noise(*size, seed=3 + i) for i, size in enumerate(sizes)]
    want = reference(loaded.directory)(**inputs_of(loaded, images, "What is it?")).logits[0].numpy()
    want = want * loaded.case.logit_scale
    prompt = prompt_of(loaded, sizes, "What is it?")
    rows = {VisualKey(str(i) * 64): visual_rows(loaded, image, 2)[1] for i, image in enumerate(images)}
    count = len(prompt.token_ids)
    span = prompt.spans[0]
    cuts = {
        "whole": [count],
        "ones": list(range(1, count + 1)),
        "in the span": [span.start + 1, span.start + span.length - 1, span.start + span.length, count],
        "sixteens": [*range(16, count, 16), count],
    }
    first: np.ndarray = np.empty(0)
    for name, ends in cuts.items():
        backend = load_backend(loaded.directory, num_blocks=-(-count // 16), backend=kind)
        got = run(backend, prompt, rows, ends)
        assert relative_error(got, want) <= BOUND[kind], name
        if kind == "native":
            first = got if name == "whole" else first
            assert np.array_equal(got, first), name
    for start in range(span.start - 1, span.start + span.length + 1):  # a prefix hit that ends here
        assert relative_error(run(backend, prompt, rows, [count], start), want[start:]) <= BOUND[kind], start


@torch.no_grad()
def test_greedy_answers_equal_generate(loaded: Loaded) -> None:
    image = noise(75, 40, seed=9)
    model = reference(loaded.directory)
    inputs = inputs_of(loaded, [image], "Read it.")
    want = model.generate(**inputs, do_sample=False, max_new_tokens=16, eos_token_id=None)[0].tolist()
    prompt = prompt_of(loaded, [(75, 40)], "Read it.")
    rows = {VisualKey("0" * 64): visual_rows(loaded, image)[1]}
    backend = load_backend(loaded.directory, num_blocks=16, backend="auto")
    ids = list(prompt.token_ids)
    logits = run(backend, prompt, rows, [len(ids)])
    for _ in range(16):
        ids.append(int(logits[-1].argmax()))
        rope = rope_positions(prompt.spans, len(ids) - 1, len(ids))
        item = StepItem((ids[-1],), len(ids) - 1, tuple(range(16)), 1, rope=rope)
        logits = backend.execute(StepPlan((item,)))
    assert ids[: len(want)] == want


@pytest.mark.parametrize("form", ["newest", "older", "sharded", "bfloat16"])
def test_every_form_of_names_loads_to_the_same_tensors(loaded: Loaded, form: str, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(loaded.directory, other)
    tensors = load_file(loaded.directory / "model.safetensors")
    if form in ("newest", "sharded"):
        model = reference(loaded.directory)
        (other / "model.safetensors").unlink()
        model.save_pretrained(
            other, save_original_format=False, max_shard_size="60KB" if form == "sharded" else "5GB"
        )
    elif form == "older":
        newest = dict(loaded.case.old_names)
        renamed = {}
        for name, tensor in tensors.items():
            prefix = next((p for p in sorted(newest, key=len, reverse=True) if name.startswith(p)), "")
            renamed[newest.get(prefix, "") + name.removeprefix(prefix)] = tensor
        save_file(renamed, other / "model.safetensors")
    else:
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, other / "model.safetensors")
    ours, theirs = load_encoder(other), load_encoder(loaded.directory)
    tolerance = 0.02 if form == "bfloat16" else 0.0
    for one, two in zip(
        [*ours.tower.parameters(), *ours.connector.parameters()],
        [*theirs.tower.parameters(), *theirs.connector.parameters()],
        strict=True,
    ):
        assert torch.allclose(one, two, rtol=tolerance, atol=tolerance)
    load_backend(other, num_blocks=1, backend="torch")
