"""InternVL's original form beside the one that transformers saves, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family_checkpoints import CASES, CHATML, make_checkpoint
from safetensors.torch import load_file, save_file

from encoder.encoder_config import EncoderConfigError
from llm.decoder_config import ConfigError
from llm.request import VisualKey
from vlm.families.tiled import internvl
from vlm.loading import load_encoder, load_weights
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec

# names of the saved form: of the original one
RENAMED = (
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"^vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer", ".attn.proj"),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"\.lambda_", ".ls"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def original_form(saved: Path, target: Path) -> Path:
    shutil.copytree(saved, target)
    tensors = load_file(saved / "model.safetensors")
    out: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        if ".q_proj." in name and name.startswith("vision_tower"):
            joined = torch.cat([tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
            name, tensors[name] = name.replace(".attention.q_proj.", ".attn.qkv."), joined
            out[re.sub(*RENAMED[3], name)] = joined
            continue
        if re.search(r"vision_tower.*\.[kv]_proj\.", name):
            continue
        new = name
        for pattern, replacement in RENAMED:
            new = re.sub(pattern, replacement, new)
        out[new] = tensors[name]
    save_file(out, target / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm")}
    vision |= {"image_size": 28, "patch_size": 7}
    original = {
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": vision,
        "force_image_size": 28,
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "downsample_ratio": 0.5,
        "select_layer": -1,
    }
    (target / "config.json").write_text(json.dumps(original))
    (target / "processor_config.json").unlink()
    (target / "chat_template.jinja").write_text(PLAIN)
    return target


def test_the_original_form_is_the_same_model(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "internvl_300m_qwen3_untied")
    saved = make_checkpoint(case, tmp_path / "saved", 3)
    original = original_form(saved, tmp_path / "original")
    tiles = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 3), np.uint8)
    one, two = load_encoder(saved).encode([tiles])[0], load_encoder(original).encode([tiles])[0]
    assert torch.equal(one, two)
    assert torch.equal(load_weights(saved).layers[1].qkv, load_weights(original).layers[1].qkv)
    specs = [ModelSpec.load(saved), ModelSpec.load(original)]
    assert specs[0].preprocess.rule == specs[1].preprocess.rule
    prompts = []
    for spec in specs:
        part = ImagePart(spec.preprocess.rule.grid(100, 50, "auto"), VisualKey("a" * 64))
        prompts.append(spec.prompt_builder.build([Message("user", (part, "What is it?"))]))
    assert "IMAGE" in CHATML and prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_config": {"norm_type": "batch"}}, "norm_type"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"model_type": "internvl_chat", "llm_config": {"model_type": "internlm2"}}, "internlm2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises((EncoderConfigError, ConfigError), match=named):
        internvl.encoder({"model_type": "internvl"} | extra, {})


def test_sizes_of_published_checkpoints() -> None:
    """InternVL3-1B: 256 visual tokens a tile, 13 tiles and two markers for 1024x768."""
    config = internvl.encoder(
        {"model_type": "internvl", "text_config": {"model_type": "qwen2", "hidden_size": 896}}, {}
    )
    assert config.geometry.tokens_per_tile == 256 and config.tower.num_positions == 1025
    grid = internvl.preprocess({"model_type": "internvl"}, {}, "fast").rule.grid(1024, 768, "auto")
    assert grid.num_tiles == 13
