"""`open_clip:TOWER[@PRETRAINED]:DECODER`: weights of a tag or of a repository, through the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from local_hub import LocalHub, Repo
from safetensors.torch import save
from test_articles_form import NAME, REPO, decoder_directory, narrow_tower

from encoder import openclip
from encoder.tower import Tower
from llm.text_config import ConfigError
from vlm import model_source
from vlm.build import build_encoder
from vlm.config import EngineOptions
from vlm.hub import Hub, HubError
from vlm.model_source import ModelSource
from vlm.spec import ModelSpec

__all__ = ["narrow_tower"]

CONFIG = {"model_cfg": {"vision_cfg": {"timm_model_name": "narrow", "image_size": 384}}}


@pytest.fixture
def hub(narrow_tower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    torch.manual_seed(3)
    tower = Tower(openclip.open_clip_tower(narrow_tower))
    torch.nn.init.zeros_(tower.pos_embed)
    weights = {f"visual.trunk.{name}": weight for name, weight in tower.state_dict().items()}
    files = {
        openclip.WEIGHTS_FILE: save(weights | {"logit_scale": torch.ones(1)}),
        openclip.CONFIG_FILE: json.dumps(CONFIG).encode(),
    }
    with LocalHub().running() as hub:
        hub.repos[REPO] = Repo(files)
        cache = tmp_path / "cache"
        monkeypatch.setattr(model_source, "Hub", lambda say: Hub(endpoint=hub.url, cache=cache, token="x"))
        yield hub


@pytest.mark.parametrize("tower", ["narrow@some-tag", f"hf-hub:{REPO}"])
def test_a_towers_weights_come_from_the_hub_once_and_their_processes_ask_it_no_more(
    hub: LocalHub, tmp_path: Path, tower: str
) -> None:
    model = f"open_clip:{tower}:{decoder_directory(tmp_path / 'decoder')}"
    source = ModelSource.parse(model)
    spec, seen = ModelSpec.load(source_text := str(source)), hub.gets.copy()
    assert ModelSource.parse(source_text) == source
    encoder = build_encoder(source, EngineOptions(model=source_text))
    assert hub.gets == seen and seen[openclip.WEIGHTS_FILE] == 1
    assert (
        encoder.revision == spec.revision != ModelSpec.load(f"open_clip:narrow:{source.directory}").revision
    )
    torch.manual_seed(3)
    assert torch.equal(
        encoder.tower.blocks[0].mlp.fc1.weight, Tower(encoder.config.tower).blocks[0].mlp.fc1.weight
    )
    ModelSource.parse(model)
    assert hub.gets[openclip.WEIGHTS_FILE] == 1
    hub.status = 503
    with pytest.raises(HubError, match="503"):
        ModelSource.parse(model)


def test_a_repository_is_one_key_wherever_its_cache_lies(hub: LocalHub, tmp_path: Path) -> None:
    source = ModelSource.parse(f"open_clip:hf-hub:{REPO}:{decoder_directory(tmp_path / 'decoder')}")
    assert source.name == f"{REPO}+decoder"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, data in hub.repos[REPO].files.items():
        (elsewhere / name).write_bytes(data)
    other = ModelSpec.load(f"open_clip:local-dir:{elsewhere}:{source.directory}")
    assert other.revision == ModelSpec.load(str(source)).revision


def test_a_plan_reads_no_weights(hub: LocalHub, tmp_path: Path) -> None:
    decoder = decoder_directory(tmp_path / "decoder")
    for tower in ("narrow@some-tag", f"hf-hub:{REPO}"):
        spec = ModelSpec.load(f"open_clip:{tower}:{decoder}", files="config")
        assert spec.geometry.tokens_per_tile == 196
    assert hub.gets[openclip.WEIGHTS_FILE] == 0


def test_damaged_weights_are_not_kept(hub: LocalHub, tmp_path: Path) -> None:
    true = hub.repos[REPO].files[openclip.WEIGHTS_FILE]
    hub.lies[openclip.WEIGHTS_FILE] = true[:-8] + b"\1" * 8
    model = f"open_clip:narrow@some-tag:{decoder_directory(tmp_path / 'decoder')}"
    with pytest.raises(HubError, match="arrived damaged"):
        ModelSource.parse(model)
    hub.lies.clear()
    assert ModelSource.parse(model).tower_file.read_bytes() == true


@pytest.mark.parametrize(
    ("tower", "said"),
    [
        (
            f"{NAME}@laion",
            "weights of ViT-SO400M-14-SigLIP-384 must be a file or one of open_clip's tags: webli",
        ),
        ("RN50@openai", "open_clip tower must be one of ViT-B-16-SigLIP, "),
        ("hf-hub:one", "must be hf-hub:ORG/NAME"),
    ],
)
def test_what_the_registry_lacks_is_refused_with_what_it_has(tower: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelSource.parse(f"open_clip:{tower}:{tmp_path}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_cfg": {"vision_cfg": {"timm_model_name": "resnet50"}}}, "open_clip trunk must be one of"),
        (
            {"model_cfg": {"vision_cfg": {"timm_model_name": "narrow", "image_size": 224}}},
            "image_size must be",
        ),
        (CONFIG | {"preprocess_cfg": {"mean": [0.48, 0.46, 0.41]}}, "mean and std must be 0.5"),
        ([], "can't be read"),
    ],
)
def test_a_repositorys_config_says_what_the_tower_is(
    narrow_tower: str, tmp_path: Path, config: object, said: str
) -> None:
    (tmp_path / openclip.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(openclip.EncoderConfigError, match=said):
        openclip.open_clip_tower(f"local-dir:{tmp_path}")
