import asyncio
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_fixtures import tiny_network, tiny_template

from llm.request import Delta, SamplingParams, TokenLogprob, VisualKey
from vlm.build import build_local_pipeline
from vlm.config import EngineOptions
from vlm.pipeline import ChatMessage, ImageInput
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec
from vlm.train.decoder import segment_mask
from vlm.train.drawing.documents import compose_document
from vlm.train.drawing.tiles import cut
from vlm.train.export import export
from vlm.train.generate import answer_all, answerer
from vlm.train.network import Network
from vlm.train.optim import orthogonalise
from vlm.train.prompts import PromptBuilder


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    template = tiny_template(tmp_path / "template")
    export(tiny_network(template), template, tmp_path / "export")
    return tmp_path / "export"


def logits(network: Network, builder: PromptBuilder, seed: int, pairs: list[tuple[str, str]]) -> list[Tensor]:
    """Logits of each question's segment, asked together."""
    pieces = cut(compose_document("receipt", seed).image)
    sequence = builder.sequence([pieces.grid], pairs)
    visual = network.model.connector(network.model.vision_model(torch.from_numpy(pieces.pixels))).flatten(
        0, 1
    )
    segments = torch.from_numpy(sequence.segments)
    layout = network.layout(torch.from_numpy(sequence.positions), [len(segments)], [segment_mask(segments)])
    everywhere = torch.arange(len(segments))
    found = network.decode(torch.from_numpy(sequence.tokens), visual, layout, everywhere)
    return [found[segments == number] for number in range(1, len(pairs) + 1)]


@torch.no_grad()
def test_transformers_loads_an_exported_directory_unchanged_and_computes_the_same(exported: Path) -> None:
    from transformers import SmolVLMForConditionalGeneration

    reference = SmolVLMForConditionalGeneration.from_pretrained(exported, dtype=torch.float32).eval()
    network, builder = Network.load(exported), PromptBuilder(exported)
    document = compose_document("invoice", 4)
    pieces = cut(document.image)
    tokens = builder.prefix(pieces.grid) + builder.segment("What is the total?", "")[0]
    pixels = torch.from_numpy(pieces.pixels).permute(0, 3, 1, 2)[None].float() / 127.5 - 1
    expected = reference(input_ids=torch.tensor([tokens]), pixel_values=pixels).logits[0]
    visual = network.model.connector(network.model.vision_model(torch.from_numpy(pieces.pixels))).flatten(
        0, 1
    )
    mask = segment_mask(torch.zeros(len(tokens), dtype=torch.long))
    layout = network.layout(torch.arange(len(tokens)), [len(tokens)], [mask])
    found = network.decode(torch.tensor(tokens), visual, layout, torch.arange(len(tokens)))
    assert torch.allclose(found, expected, atol=2e-5)


@torch.no_grad()
def test_the_service_computes_what_training_does(exported: Path) -> None:
    """Prompt, tiles, tower and decoder of one, then of the other: the same tokens at the same odds."""
    image, question = compose_document("receipt", 7).image.resize((256, 256)), "What is the total?"
    out = io.BytesIO()
    image.save(out, "PNG")

    async def serve() -> list[TokenLogprob]:
        pipeline = build_local_pipeline(EngineOptions(model=str(exported), backend="torch"))
        await pipeline.start()
        try:
            params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
            chat = [ChatMessage("user", (ImageInput(out.getvalue()), question))]
            events = [event async for event in pipeline.run(pipeline.prepare("r", chat, params))]
            return [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
        finally:
            await pipeline.close()

    served = asyncio.run(serve())
    network, builder = Network.load(exported), PromptBuilder(exported)
    pieces = cut(image)
    answer = [entry.token_id for entry in served]
    prompt = builder.prefix(pieces.grid) + builder.segment(question, "")[0]
    tokens = torch.tensor(prompt + answer)
    visual = network.model.connector(network.model.vision_model(torch.from_numpy(pieces.pixels))).flatten(
        0, 1
    )
    mask = segment_mask(torch.zeros(len(tokens), dtype=torch.long))
    layout = network.layout(torch.arange(len(tokens)), [len(tokens)], [mask])
    before = torch.arange(len(prompt) - 1, len(tokens) - 1)
    odds = network.decode(tokens, visual, layout, before).log_softmax(-1)
    assert len(answer) == 8 and odds.argmax(-1).tolist() == answer
    expected = odds.gather(1, tokens[len(prompt) :, None])[:, 0]
    assert torch.allclose(torch.tensor([entry.logprob for entry in served]), expected, atol=2e-4)


@torch.no_grad()
def test_questions_packed_together_get_the_logits_they_get_alone(exported: Path) -> None:
    network, builder = Network.load(exported), PromptBuilder(exported)
    pairs = [("Who is the seller?", "Nord Ltd"), ("Read line 1.", "Nord Ltd"), ("What is the total?", "7.10")]
    together = logits(network, builder, 5, pairs)
    for pair, packed in zip(pairs, together, strict=True):
        (alone,) = logits(network, builder, 5, [pair])
        assert torch.allclose(packed, alone, atol=1e-5)


def test_export_rounds_to_half_precision_and_keeps_nothing_of_training(
    exported: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    weights = load_file(exported / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(name.startswith("model.") for name in weights)
    again = Network.load(exported)
    export(again, exported, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        exported / "model.safetensors"
    ).read_bytes()


def test_answers_do_not_depend_on_the_other_questions(exported: Path) -> None:
    network, builder = Network.load(exported), PromptBuilder(exported)
    image = compose_document("label", 1).image
    questions = ["Read the text.", "Read line 1."]
    together = answer_all(network, builder, image, questions, max_new_tokens=6)
    assert together == [answer_all(network, builder, image, [q], max_new_tokens=6)[0] for q in questions]
    assert isinstance(answerer(exported)(image, "Read line 1."), str)


def test_a_checkpoint_of_another_family_is_refused(exported: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(exported / "model.safetensors")
    weights.pop("model.text_model.norm.weight")
    save_file(weights, exported / "model.safetensors")
    with pytest.raises(ValueError, match="not a checkpoint of this family"):
        Network.load(exported)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 48), (2, 48, 16), (1, 32, 32)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.max() < 1.4
        assert values.median() > 0.6


def test_a_further_question_reads_as_the_service_writes_a_chat(tmp_path: Path) -> None:
    folder = tiny_template(tmp_path / "template")
    builder, spec = PromptBuilder(folder), ModelSpec.load(folder, files="text")
    grid = cut(compose_document("receipt", 1).image).grid
    pairs = [("What is the total?", "7.10"), ("What is the date?", "2024-03-18")]
    sequence = builder.sequence([grid], pairs, turns=True)
    chat = spec.prompt_builder.build(
        [
            Message("user", (ImagePart(grid, VisualKey("k")), "What is the total?")),
            Message("assistant", ("7.10",)),
            Message("user", ("What is the date?",)),
        ]
    )
    told = builder.segment(*pairs[1])[1]
    assert sequence.tokens.tolist() == [*chat.token_ids, *told]
    assert sequence.positions.tolist() == list(range(len(sequence.tokens)))
    assert set(sequence.segments.tolist()) == {0, 1}


def test_every_answer_of_a_chat_is_trained_and_nothing_else(tmp_path: Path) -> None:
    builder = PromptBuilder(tiny_template(tmp_path / "template"))
    grid = cut(compose_document("receipt", 1).image).grid
    pairs = [("What is the total?", "7.10"), ("What is the date?", "2024-03-18")]
    for turns in (False, True):
        sequence = builder.sequence([grid], pairs, turns=turns)
        wanted = sequence.targets[sequence.targets >= 0].tolist()
        assert wanted == [token for pair in pairs for token in builder.segment(*pair)[1]]
