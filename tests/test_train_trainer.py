from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from train_fixtures import tiny_network, tiny_template

from vlm.train.batches import collate, draw, draw_asked
from vlm.train.drawing.documents import KINDS, compose_document
from vlm.train.drawing.plausible import PLAUSIBLE_KINDS
from vlm.train.prompts import PromptBuilder
from vlm.train.questions import QuestionSet, ask_of_two, choose_questions
from vlm.train.stages import BEST, LAST, STAGES, Stage
from vlm.train.trainer import AVERAGE, Trainer, run_batch, score, validate

STAGE = replace(STAGES["join"], steps=4, batch=2, micro_batches=1, warmup=2, validate_every=100)


def trainer(folder: Path, template: Path) -> Trainer:
    return Trainer(tiny_network(template), PromptBuilder(template), folder)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return tiny_template(tmp_path / "template")


def test_a_resumed_run_equals_one_never_stopped(tmp_path: Path, template: Path) -> None:
    whole = trainer(tmp_path / "whole", template)
    for _ in range(4):
        whole.step(STAGE)
    first = trainer(tmp_path / "parts", template)
    for _ in range(2):
        first.step(STAGE)
    first.save(LAST)
    second = trainer(tmp_path / "parts", template)
    second.resume(tmp_path / "parts" / LAST)
    for _ in range(2):
        second.step(STAGE)
    assert second.progress.documents == whole.progress.documents
    assert second.progress.exact == whole.progress.exact
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, second.network.state_dict()[name]), name


def test_the_averaged_network_lies_between_start_and_end(tmp_path: Path, template: Path) -> None:
    run = trainer(tmp_path / "run", template)
    start = run.network.model.text_model.norm.weight.detach().clone()
    run.step(replace(STAGE, warmup=1))
    end, mean = run.network.model.text_model.norm.weight, run.averaged().model.text_model.norm.weight
    assert not torch.equal(start, end)
    assert torch.allclose(mean, start + (end - start) * (1 - AVERAGE), atol=1e-7)


def test_a_stage_without_tower_share_leaves_tower_and_connector_alone(tmp_path: Path, template: Path) -> None:
    run = trainer(tmp_path / "run", template)
    before = {name: weight.clone() for name, weight in run.network.state_dict().items()}
    run.step(replace(STAGE, tower_share=0.0, patch_weight=0.0))
    changed = {
        name for name, weight in run.network.state_dict().items() if not torch.equal(weight, before[name])
    }
    assert changed
    assert all(".text_model." in name for name in changed)


def test_the_best_checkpoint_is_kept_and_validation_logged(tmp_path: Path, template: Path) -> None:
    lines: list[str] = []
    run = trainer(tmp_path / "run", template)
    run.run(replace(STAGE, steps=1), lines.append)
    assert (tmp_path / "run" / BEST).is_file()
    assert (tmp_path / "run" / LAST).is_file()
    assert (tmp_path / "run" / "log.jsonl").read_text().count("\n") == 1
    assert any(line.startswith("validation ") for line in lines)


def test_loss_falls_on_repeated_documents(tmp_path: Path, template: Path) -> None:
    run = trainer(tmp_path / "run", template)
    document = compose_document("label", 7, 0.0)
    batch = collate([(document, QuestionSet(list(document.questions)))], run.builder)
    losses = []
    for _ in range(30):
        outcome = run_batch(run.network, batch, with_heads=True, frozen_tower=False)
        (outcome.answer_loss + outcome.patch_loss).backward()
        run.optimisers.step({"tower": 3e-3, "decoder": 3e-3, "head": 3e-3})
        losses.append(float(outcome.answer_loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_equal_tiles_are_encoded_once_and_used_in_order(template: Path) -> None:
    builder = PromptBuilder(template)
    document = compose_document("receipt", 1)
    once = collate([(document, QuestionSet(list(document.questions[:1])))], builder)
    twice = collate([(document, QuestionSet(list(document.questions[:1])))] * 2, builder)
    assert len(twice.tiles) == len(once.tiles)
    assert twice.uses.tolist() == once.uses.tolist() * 2
    assert twice.lengths == once.lengths * 2


def test_drawn_documents_depend_on_number_and_run_seed_only() -> None:
    mix, levels = dict.fromkeys(KINDS, 1.0), dict.fromkeys(KINDS, 0.5)
    first = [draw(index, 1, mix, levels)[0].lines for index in range(12)]
    assert first == [draw(index, 1, mix, levels)[0].lines for index in range(12)]
    assert first != [draw(index, 2, mix, levels)[0].lines for index in range(12)]


def test_questions_stay_within_the_token_limit(template: Path) -> None:
    builder = PromptBuilder(template)
    mix, levels = {"invoice": 1.0}, dict.fromkeys(KINDS, 1.0)
    for index in range(30):
        document, rng = draw(index, 0, mix, levels)
        chosen = choose_questions(rng, document, builder).questions
        tokens = sum(len(part) for q in chosen for part in builder.segment(q.text, q.answer))
        assert chosen
        assert len(chosen) == 1 or tokens <= 150


def test_questions_come_in_both_orders_and_documents_from_both_generators(template: Path) -> None:
    builder = PromptBuilder(template)
    mix, levels = {"receipt": 1.0}, dict.fromkeys(KINDS, 1.0)
    asked, ratios = [], []
    for index in range(60):
        document, rng = draw(index, 0, mix, levels)
        ratios.append(document.image.width / document.image.height)
        asked.append(choose_questions(rng, document, builder))
    first = [one for one in asked if one.first]
    assert 15 < len(first) < 45 and all(len(one.questions) == 1 for one in first)
    chats = [one for one in asked if one.turns]
    assert chats and all(1 < len(one.questions) <= 3 and not one.first for one in chats)
    assert 10 < sum(ratio in (0.5, 1.0) for ratio in ratios) < 40


def test_score_weighs_document_kinds_equally() -> None:
    assert score({"a/x": 1.0, "a/y": 0.0, "b/x": 1.0}) == 0.75


def test_validation_names_every_kind_of_document(tmp_path: Path, template: Path) -> None:
    accuracies = validate(tiny_network(template), PromptBuilder(template), per_kind=2)
    plausible = {f"plausible {kind}" for kind in PLAUSIBLE_KINDS}
    assert {name.split("/")[0] for name in accuracies} == set(KINDS) | plausible
    assert all(0.0 <= value <= 1.0 for value in accuracies.values())


def test_the_rate_warms_up_and_decays_to_nothing(tmp_path: Path, template: Path) -> None:
    run = trainer(tmp_path / "run", template)
    stage = Stage("s", steps=10, rate=1.0, warmup=2, decay=5, tower_share=0.5)
    rates = []
    for step in range(10):
        run.progress.step = step
        rates.append(run.rates(stage))
    assert [rate["decoder"] for rate in rates[:3]] == [0.5, 1.0, 1.0]
    assert [round(rate["decoder"], 2) for rate in rates[5:]] == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert all(rate["tower"] == rate["decoder"] / 2 for rate in rates)


def test_a_question_about_two_images_names_the_one_its_answer_is_in(template: Path) -> None:
    builder = PromptBuilder(template)
    documents = compose_document("receipt", 3), compose_document("label", 4)
    for seed in range(20):
        asked = ask_of_two(Random(seed), *documents)
        for question in asked.questions:
            (place,) = (
                n for n, name in enumerate(("first", "second")) if f"the {name} image" in question.text
            )
            assert question.answer in "\n".join(documents[place].lines)
        batch = collate([(documents[0], asked)], builder)
        single = [collate([(document, QuestionSet([]))], builder) for document in documents]
        assert len(batch.uses) == sum(len(one.uses) for one in single)
        assert batch.answers[-1][2] == int((batch.targets >= 0).sum())


def test_some_documents_come_in_pairs(template: Path) -> None:
    builder, levels = PromptBuilder(template), dict.fromkeys(KINDS, 1.0)
    drawn = [draw_asked(index, 0, {"sign": 1.0}, levels, builder)[1] for index in range(200)]
    assert 2 <= sum(len(one.further) for one in drawn) <= 25
