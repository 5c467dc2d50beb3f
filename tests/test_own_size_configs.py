"""Configs of families whose images keep their own size: what they leave out, older forms, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, make_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from encoder.encoder_config import EncoderConfigError
from llm.decoder_config import ConfigError
from llm.text.tokenizer import Tokenizer
from vlm.checkpoint import Checkpoint
from vlm.families.registry import BY_MODEL_TYPE, family_of, find_family
from vlm.loading import load_encoder, load_weights

MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl", "glm_ocr")
TYPES = ("lighton_ocr", "mistral3", *(name for name in MROPE if name != "glm_ocr"))
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


@pytest.mark.parametrize("model_type", MROPE)
@pytest.mark.parametrize("sections", [[16, 24], [16, 24, 25], [0, 0, 0]])
def test_sections_that_do_not_fit_a_head_are_refused(model_type: str, sections: list[int]) -> None:
    whole = spelled_out(model_type)
    whole["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(ConfigError, match="mrope_section"):
        BY_MODEL_TYPE[model_type].decoder(whole)


@pytest.mark.parametrize("key", ["patch_size", "merge_size", "temporal_patch_size"])
def test_a_processor_of_another_towers_patches_is_refused(key: str) -> None:
    for model_type in MROPE:
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


def test_what_a_glm_config_leaves_out_is_what_its_class_has() -> None:
    """But for one width: the class's own defaults don't fit each other."""
    text = {"hidden_size": 1536, "num_attention_heads": 24}
    sparse = {"model_type": "glm_ocr", "text_config": text}
    whole = AutoConfig.for_model("glm_ocr", text_config=text).to_dict()
    assert read(sparse) == read(whole)
    with pytest.raises(EncoderConfigError, match="out_hidden_size"):
        read({"model_type": "glm_ocr"})


def test_a_glm_decoder_is_priced_at_the_parameters_it_has(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "glm_ocr")
    directory = make_checkpoint(case, tmp_path / "glm", seed=1)
    tensors = load_file(directory / "model.safetensors")
    held = sum(tensor.numel() for name, tensor in tensors.items() if "visual." not in name)
    assert Checkpoint.read(directory).shape.num_params == held


def test_the_layer_of_a_glm_checkpoint_that_guesses_ahead_is_let_be_and_no_other_is(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "glm_ocr")
    directory = make_checkpoint(case, tmp_path / "glm", seed=1)
    file = directory / "model.safetensors"
    tensors, layers = load_file(file), "model.language_model.layers."
    assert any(name.startswith(layers) for name in tensors)
    save_file(tensors | {f"{layers}2.eh_proj.weight": torch.ones(2, 2)}, file)
    load_weights(directory), load_encoder(directory)
    save_file(tensors | {f"{layers}3.eh_proj.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match="eh_proj"):
        load_weights(directory)


@pytest.mark.parametrize("version", ["4.50.0.dev0", "5.0.0"])
def test_words_of_older_mistral_files_are_tekkens(version: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "mistral3")
    directory = make_checkpoint(case, tmp_path / "mistral3", seed=1)
    cut = {"type": "Split", "pattern": {"Regex": "[^\\s]+"}, "behavior": "Isolated", "invert": False}
    spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Sequence", "pretokenizers": [cut, spell]}
    large = {"transformers_version": version, "text_config": {"vocab_size": 131_072}}
    changes = {"config.json": large, "tokenizer.json": {"pre_tokenizer": words}}
    for name, change in changes.items():
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    raw = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = TokenizersBackend._patch_mistral_regex(raw, directory, is_local=True, fix_mistral_regex=True)
    ours = Checkpoint.read(directory).tokenizer
    texts = ["self.self_self", "12345 pipelinePipeline", "import from  def\n\n  return/None", "it's\u00e9 x"]
    found = [ours.encode(text) for text in texts]
    assert found == [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert (found != [Tokenizer.from_directory(directory).encode(text) for text in texts]) == (
        version[0] == "4"
    )


def test_a_family_claims_only_what_its_parts_are() -> None:
    llava = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    ministral = {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}
    for config, part in (
        (llava, "vision_config of type pixtral"),
        (ministral, "text_config of type mistral"),
    ):
        assert find_family(config) is None
        with pytest.raises(ConfigError, match=part):
            family_of(config)
    assert find_family({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}) is not None


def test_ministral_3_goes_as_far_as_its_rope_was_trained() -> None:
    whole = AutoConfig.for_model("mistral3", text_config={"model_type": "ministral3"}).to_dict()
    sparse = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    assert read(sparse) == read(whole)
    decoder = read(sparse)[1]
    assert decoder.max_positions == 16384 and decoder.ropes[0].rope_type == "yarn"
