"""Models that no family claims answer through transformers as `generate` does, behind our engine client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_case import reference
from foreign_checkpoints import FOREIGN_CASES, make_foreign
from live_serve import vlm_serve
from PIL import Image
from transformers import AutoProcessor

from llm.request import Delta, Failed, RequestError, SamplingParams
from llm.text_config import ConfigError
from preprocess.stage import preprocess
from vlm.build import build_local_pipeline
from vlm.cli.errors import CommandError
from vlm.cli.tokens import show_tokens
from vlm.config import DEFAULT_MODEL, EngineOptions, SettingsError
from vlm.foreign.engine_choice import takes_transformers, transformers_types
from vlm.foreign.foreign_engine import build_foreign_runner
from vlm.foreign.foreign_spec import ForeignSpec
from vlm.model_source import ModelSource
from vlm.pipeline import ChatMessage, ImageInput, Pipeline
from vlm.prompt import Rendering
from vlm.tools.calls import Tool
from workers.anymodel.foreign_runner import ForeignRunner
from workers.contract.engine_client import ENGINE_DIED
from workers.contract.streams import AnswerFailed
from workers.local.engine_process import EngineProcess
from workers.local.preprocess_inline import InlinePreprocess

NAMES = [case.name for case in FOREIGN_CASES]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, skip_special_tokens=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("foreign")
    return {case.name: make_foreign(case, root / case.name) for case in FOREIGN_CASES}


@cache
def picture(seed: int, width: int = 50, height: int = 31) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class Bench:
    """A runner with its pipeline's own planning, stepped by hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.spec = ForeignSpec.load(ModelSource.parse(folder))
        self.runner: ForeignRunner = build_foreign_runner(EngineOptions(model=str(folder), **options))
        self.plan = Pipeline(self.spec, InlinePreprocess(), EngineProcess([]))
        self.images: dict[str, Any] = {}
        self.events: list[Any] = []

    def ask(self, name: str, question: str, *images: bytes, params: SamplingParams = GREEDY) -> None:
        content = (*map(ImageInput, images), question)
        prepared = self.plan.prepare(name, [ChatMessage("user", content)], params)
        self.images |= {image.key: image for image in prepared.images}
        self.runner.submit(prepared.request)

    def step(self) -> list[Any]:
        events = self.runner.step()
        for event in events:
            if type(event).__name__ == "WantVisual":
                image = self.images[event.key]
                self.runner.put_tiles(event.key, preprocess(image.data, image.spec))
        self.events += events
        return events

    def run(self) -> None:
        while self.runner.has_work:
            self.step()

    def answer(self, question: str, *images: bytes, params: SamplingParams = GREEDY) -> str:
        name = f"r{len(self.events)}"
        self.ask(name, question, *images, params=params)
        self.run()
        return self.text(name)

    def text(self, name: str) -> str:
        mine = [event for event in self.events if event.request_id == name]
        failed = [event for event in mine if isinstance(event, Failed)]
        assert not failed, failed
        return "".join(event.text for event in mine if isinstance(event, Delta))

    def ids(self, name: str) -> list[int]:
        mine = [event for event in self.events if event.request_id == name and isinstance(event, Delta)]
        return [i for event in mine for i in event.token_ids]

    @property
    def work(self) -> tuple[int, int]:
        """(encoder calls, tokens prefilled)."""
        stats = self.runner.stats()
        return stats["encoder"]["calls"], stats["engine"]["prefilled_tokens"]


@pytest.fixture(scope="module")
def benches(folders: dict[str, Path]) -> dict[str, Bench]:
    return {name: Bench(folder) for name, folder in folders.items()}


class Reference:
    """The model's own processor and `generate`, as its card says to use them."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = reference(folder)
        self.model.generation_config.eos_token_id = None

    def ids(self, question: str, *images: bytes) -> list[int]:
        pictures = [Image.open(io.BytesIO(image)) for image in images]
        if self.processor.chat_template:
            content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        else:
            text = "<image>" * len(images) + question
        inputs = self.processor(text=[text], images=[pictures], return_tensors="pt")
        inputs.pop("labels", None)
        told = self.model.generate(**inputs, max_new_tokens=12, do_sample=False)
        return told[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_generate_cold_and_warm(
    name: str, folders: dict[str, Path], benches: dict[str, Bench]
) -> None:
    bench, expected = benches[name], Reference(folders[name])
    for count in (1, 2):
        images = [picture(seed, 50 + 9 * seed) for seed in range(count)]
        for question in ("what is this?", "is it red", "a third question", "what is this?"):
            bench.events.clear()
            bench.answer(question, *images)
            assert bench.ids("r0") == expected.ids(question, *images)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_question_encodes_nothing_and_prefills_only_its_text_where_images_do_not_see_it(
    name: str, benches: dict[str, Bench]
) -> None:
    bench = benches[name]
    bench.answer("what is this?", picture(70))
    calls, tokens = bench.work
    bench.answer("and that, what is it?", picture(70))
    usage = bench.events[-1].usage
    more_calls, prefilled = bench.work[0] - calls, bench.work[1] - tokens
    assert more_calls == 0
    assert prefilled == usage.prompt_tokens - usage.cached_tokens
    assert (usage.cached_tokens > 0) == (name != "paligemma")
    assert usage.image_tokens == {"paligemma": 16, "mllama": 1}.get(name, usage.image_tokens) > 0


@pytest.mark.parametrize("name", NAMES)
def test_eight_clients_with_different_images_get_the_answers_that_each_gets_alone(
    name: str, folders: dict[str, Path], benches: dict[str, Bench]
) -> None:
    alone = [benches[name].answer("what is this?", picture(seed, 40 + seed)) for seed in range(8)]
    bench = Bench(folders[name], visual_cache_mb=1, kv_cache_mb=1)
    for seed in range(8):
        bench.ask(f"c{seed}", "what is this?", picture(seed, 40 + seed))
    bench.run()
    assert [bench.text(f"c{seed}") for seed in range(8)] == alone
    assert len(set(alone)) > 1


def test_answers_get_a_token_each_in_turn(benches: dict[str, Bench]) -> None:
    bench = benches["mllama"]
    bench.events.clear()
    for name in "abc":
        bench.ask(name, "what is this?", picture(1))
    bench.run()
    order = [event.request_id for event in bench.events if isinstance(event, Delta)]
    rounds = [set(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[4:9] == [set("abc")] * 5


def test_a_cancelled_answer_says_no_more_and_lets_go_of_its_thread(benches: dict[str, Bench]) -> None:
    bench = benches["molmo2"]
    bench.events.clear()
    bench.ask("gone", "what is this?", picture(2))
    bench.ask("stays", "what is this?", picture(2))
    while len(bench.ids("gone")) < 3:
        bench.step()
    before = threading.active_count()
    bench.runner.cancel("gone")
    assert threading.active_count() == before - 1
    bench.run()
    assert len(bench.ids("gone")) == 3 and len(bench.ids("stays")) == 12
    stats = bench.runner.stats()["engine"]
    assert (stats["running"], stats["waiting"]) == (0, 0)


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_stop_string_is_seen_across_tokens_and_not_shown(cut: int, benches: dict[str, Bench]) -> None:
    bench = benches["molmo2"]
    whole = bench.answer("what is this?", picture(3))
    stop = whole[cut : cut + 4]
    bench.events.clear()
    shown = bench.answer("what is this?", picture(3), params=replace(GREEDY, stop=(stop,)))
    assert shown == whole[: whole.index(stop)]
    assert bench.events[-1].reason == "stop"


def test_end_tokens_end_an_answer_once_it_has_its_fewest_tokens(benches: dict[str, Bench]) -> None:
    bench = benches["molmo2"]
    bench.events.clear()
    bench.answer("what is this?", picture(9))
    stop = bench.ids("r0")[2]
    for least in (0, 5):
        params = replace(GREEDY, stop_token_ids=(stop,), min_tokens=least)
        bench.events.clear()
        bench.answer("what is this?", picture(9), params=params)
        told = bench.ids("r0")
        assert stop not in told[:least] and len(told) >= least
        assert least or told.index(stop) == len(told) - 1 <= 2


def test_a_seed_repeats_its_answer_and_others_differ(benches: dict[str, Bench]) -> None:
    def drawn(seed: int) -> str:
        params = replace(GREEDY, temperature=1.5, seed=seed)
        return benches["mllama"].answer("what is this?", picture(4), params=params)

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_special_tokens_are_left_out_of_the_text_unless_they_are_asked_for(benches: dict[str, Bench]) -> None:
    bench = benches["mllama"]
    special = bench.spec.tokenizer.token_id("<|python_tag|>")
    forced = replace(GREEDY, max_tokens=2, logit_bias=((special, 100.0),))
    assert bench.answer("what?", picture(5), params=forced) == "<|python_tag|>" * 2
    assert bench.answer("what?", picture(5), params=replace(forced, skip_special_tokens=True)) == ""


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("n", {"n": 2}),
        ("beam_width", {"beam_width": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("response_format", {"constraint": ("json_schema", "{}")}),
        ("guided_regex", {"constraint": ("regex", "a")}),
    ],
)
def test_what_transformers_can_not_do_is_refused_by_its_name(
    name: str, asked: dict[str, Any], benches: dict[str, Bench]
) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is not available.*It takes max_tokens") as caught:
        benches["mllama"].ask("refused", "what?", params=replace(GREEDY, **asked))
    assert caught.value.param == name


def test_a_detail_tools_and_spelled_special_tokens_are_refused_by_name(benches: dict[str, Bench]) -> None:
    plan = benches["mllama"].plan
    with pytest.raises(RequestError, match="'detail' is not available"):
        plan.prepare("r", [ChatMessage("user", (ImageInput(picture(0), "low"),))], GREEDY)
    with pytest.raises(RequestError, match="spells a special token"):
        plan.prepare("r", [ChatMessage("user", ("two <|image|> of them",))], GREEDY)
    tools = Rendering(tools=(Tool("look", "Looks.", {"type": "object"}),))
    with pytest.raises(RequestError, match="'tools' is not available"):
        plan.prepare("r", [ChatMessage("user", ("what?",))], GREEDY, rendering=tools)


def test_an_image_that_can_not_be_had_fails_its_requests_alone(benches: dict[str, Bench]) -> None:
    bench = benches["molmo2"]
    bench.events.clear()
    bench.ask("bad", "what?", picture(6))
    (wish,) = [event for event in bench.runner.step() if event.request_id == "bad"]
    bench.runner.fail_tiles(wish.key, "image_processing_failed", "The image could not be processed.")
    bench.ask("good", "what?", picture(7))
    bench.run()
    assert [event.code for event in bench.events if isinstance(event, Failed)] == ["image_processing_failed"]
    assert len(bench.ids("good")) == 12


def test_the_engine_is_chosen_by_family_and_by_what_transformers_has(folders: dict[str, Path]) -> None:
    def choice(model: str | Path, **options: Any) -> bool:
        return takes_transformers(EngineOptions(model=str(model), **options), ModelSource.parse(model))

    assert {"paligemma", "mllama", "molmo2"} <= transformers_types()
    assert all(map(choice, folders.values()))
    assert not choice("default")
    assert choice(DEFAULT_MODEL, engine="transformers")
    assert not choice(folders["mllama"], engine="native")
    with pytest.raises(SettingsError, match="weights must be auto"):
        choice(folders["mllama"], weights="int8")


def test_the_cost_of_an_image_is_said_to_be_unknown(folders: dict[str, Path]) -> None:
    options = EngineOptions(model=str(folders["mllama"]))
    with pytest.raises(CommandError, match="can't be told ahead for this model"):
        show_tokens([Path(DEFAULT_MODEL).parent / "samples" / "shapes.png"], options, "auto", as_json=True)


def test_a_folder_with_pickled_weights_or_code_of_its_own_is_not_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["mllama"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="transformers can't load the checkpoint"):
        Bench(tmp_path)


@pytest.mark.parametrize("layers", [4, 400])
def test_weights_that_a_checkpoint_lacks_are_missed_and_not_drawn(
    layers: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["molmo2"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = layers
    config["text_config"]["rope_scaling_layers"] = list(range(layers))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"its files (lack|hold)"):
        Bench(tmp_path)


@pytest.mark.slow
def test_a_killed_engine_process_comes_back_and_answers_alike(
    folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        pipeline = build_local_pipeline(EngineOptions(model=str(folders["molmo2"])))
        engine = pipeline.engine
        assert isinstance(engine, EngineProcess)

        def ask(name: str, **changes: Any) -> Coroutine[Any, Any, Any]:
            content = (ImageInput(picture(8)), "what is this?")
            params = replace(GREEDY, **changes)
            return pipeline.answer(pipeline.prepare(name, [ChatMessage("user", content)], params))

        await pipeline.start()
        try:
            first = await ask("first")
            endless = asyncio.create_task(ask("endless", max_tokens=4000))
            await asyncio.sleep(0.2)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(AnswerFailed) as caught:
                await endless
            assert caught.value.failure.code == ENGINE_DIED[0]
            while not engine.ready:
                await asyncio.sleep(0.05)
            assert (await ask("again")).text == first.text
            assert engine.restarts == 1
        finally:
            await pipeline.close()

    asyncio.run(main())
    notices = [line for line in capfd.readouterr().err.splitlines() if "no family claims" in line]
    assert len(notices) == 1


@pytest.mark.slow
def test_serve_answers_streams_and_says_what_it_can_not_tell_or_do(
    folders: dict[str, Path], benches: dict[str, Bench], tmp_path: Path
) -> None:
    question = {"type": "text", "text": "what is this?"}
    url = "data:image/png;base64," + base64.b64encode(picture(3)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, question]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 12}
    chat |= {"ignore_eos": True, "skip_special_tokens": False, "temperature": 0}
    engine = {"model": str(folders["molmo2"])}
    with vlm_serve(tmp_path, engine=engine, model_name="m") as live, live.client() as client:
        whole = client.post("/v1/chat/completions", json=chat).json()
        lines = client.post("/v1/chat/completions", json=chat | {"stream": True}).text.splitlines()
        refused = client.post("/v1/chat/completions", json=chat | {"guided_regex": "a+"}).json()
        estimate = client.post("/v1/estimate", json={"model": "m", "messages": chat["messages"]})
        metrics = client.get("/metrics")
    bench = benches["molmo2"]
    bench.events.clear()
    assert whole["choices"][0]["message"]["content"] == bench.answer("what is this?", picture(3))
    usage = bench.events[-1].usage
    assert whole["usage"]["prompt_tokens"] == usage.prompt_tokens
    assert whole["usage"]["prompt_tokens_details"]["image_tokens"] == usage.image_tokens
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert told == whole["choices"][0]["message"]["content"]
    assert refused["error"]["param"] == "guided_regex"
    assert estimate.status_code == 400 and estimate.json()["error"]["code"] == "cost_unknown"
    assert metrics.status_code == 200
    assert sum("no family claims model_type molmo2" in line for line in live.log) == 1
