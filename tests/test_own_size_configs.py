"""Configs of families whose images keep their own size: what they leave out, older forms, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from encoder.encoder_config import EncoderConfigError
from llm.decoder_config import ConfigError
from vlm.families.registry import BY_MODEL_TYPE
from vlm.loading import load_encoder, load_weights

TYPES = ("lighton_ocr", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl")
FLAT = ("qwen2_vl", "qwen2_5_vl", "paddleocr_vl")  # whose older checkpoints have no text_config


def spelled_out(model_type: str) -> dict[str, Any]:
    return dict(AutoConfig.for_model(model_type).to_dict())


def read(config: dict[str, Any]) -> tuple[Any, Any]:
    family = BY_MODEL_TYPE[config["model_type"]]
    return family.encoder(config, {}), family.decoder(config)


@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_config_leaves_out_is_what_its_class_has(model_type: str) -> None:
    whole = spelled_out(model_type)
    width = {"out_hidden_size": whole["text_config"]["hidden_size"]}
    whole["vision_config"] |= width if "out_hidden_size" in whole["vision_config"] else {}
    sparse = {"model_type": model_type}
    assert read(sparse) == read(whole)
    assert read(sparse | {"text_config": {}, "vision_config": {}}) == read(whole)


@pytest.mark.parametrize("model_type", FLAT)
def test_decoders_keys_may_be_the_outer_configs_own(model_type: str) -> None:
    whole = spelled_out(model_type)
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    text = whole.pop("text_config") | sizes
    rope = text.pop("rope_parameters")
    nested = whole | {"text_config": text | {"rope_parameters": rope | {"mrope_section": [16, 24, 24]}}}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert read({**text, **old, **whole, "model_type": model_type}) == read(nested)


@pytest.mark.parametrize("model_type", TYPES[1:])
@pytest.mark.parametrize("sections", [[16, 24], [16, 24, 25], [0, 0, 0]])
def test_sections_that_do_not_fit_a_head_are_refused(model_type: str, sections: list[int]) -> None:
    whole = spelled_out(model_type)
    whole["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(ConfigError, match="mrope_section"):
        BY_MODEL_TYPE[model_type].decoder(whole)


@pytest.mark.parametrize("key", ["patch_size", "merge_size", "temporal_patch_size"])
def test_a_processor_of_another_towers_patches_is_refused(key: str) -> None:
    for model_type in TYPES[1:]:
        with pytest.raises(EncoderConfigError, match=key):
            BY_MODEL_TYPE[model_type].preprocess({"model_type": model_type}, {key: 5}, "fast")


def test_bounds_of_pixels_have_three_spellings() -> None:
    family = BY_MODEL_TYPE["qwen2_vl"]
    config = {"model_type": "qwen2_vl"}
    for processor in (
        {"size": {"shortest_edge": 1000, "longest_edge": 9000}},
        {"size": {"min_pixels": 1000, "max_pixels": 9000}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 1000, "max_pixels": 9000},
    ):
        rule = family.preprocess(config, processor, "fast").rule.to_json()
        assert (rule["min_pixels"], rule["max_pixels"]) == (1000, 9000)


def test_tensors_that_no_part_reads_are_let_be_and_others_are_not(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "paddleocr_vl")
    directory = make_checkpoint(case, tmp_path / "paddle", seed=1)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    prefix = next(name for name in tensors if "post_layernorm.weight" in name).removesuffix(
        "post_layernorm.weight"
    )
    for name in ("head.probe", "head.mlp.fc1.weight", "embeddings.packing_position_embedding.weight"):
        tensors[prefix + name] = torch.ones(2, 2)
    save_file(tensors, file)
    load_encoder(directory), load_weights(directory)
    save_file(tensors | {prefix + "headless.weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match="headless"):
        load_encoder(directory)
