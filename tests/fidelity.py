"""Random small checkpoints of the SmolVLM / Idefics3 family, and the reference that reads them.

Every checkpoint is a complete Hugging Face directory: config, safetensors, processor, tokenizer and chat
template. Weights are drawn so that every part of the network moves its output (fan-in scaling, biases,
norms away from one), and so that the median gap of the top two logits is above 0.1.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.utils import logging

DEFAULT_MODEL = Path(__file__).parent.parent / "vlm" / "model"
TARGET_GAP = 0.4  # median top-two logit gap that the final norm is scaled to
COPIED = ("tokenizer.json", "chat_template.jinja")


@dataclass(frozen=True)
class CheckpointSpec:
    """What a random checkpoint is made of; every field can be overridden in `random_checkpoint`."""

    family: Literal["smolvlm", "idefics3"] = "smolvlm"
    image_size: int = 64  # pixels, square tiles
    patch_size: int = 16
    scale_factor: int = 2
    vision_width: int = 48
    vision_layers: int = 2
    vision_heads: int = 3
    vision_intermediate: int = 80
    vision_act: str = "gelu_pytorch_tanh"
    text_type: str = "llama"  # llama | mistral | qwen2 | qwen3
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    tied: bool = True
    splitting: bool = True
    max_tiles_per_side: int = 3  # size.longest_edge = this * image_size
    max_positions: int = 4096
    image_mean: float = 0.5
    image_std: float = 0.5
    text_extra: dict[str, Any] = field(default_factory=dict)  # further keys of text_config
    shard_size: str = "5GB"  # "40KB" makes several files and an index
    dtype: torch.dtype = torch.float32

    @property
    def grid_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return (self.grid_side // self.scale_factor) ** 2


# Patch grids 4 to 27 (14 and 27 among them, 19 where position buckets round), odd sizes that leave pixels
# over, group sizes 1 to 8, tied and untied, with and without splitting, one file and several.
SPECS: dict[str, CheckpointSpec] = {
    "grid14_gqa2": CheckpointSpec(image_size=112, patch_size=8, scale_factor=2),
    "grid27_scale3_untied": CheckpointSpec(
        image_size=108,
        patch_size=4,
        scale_factor=3,
        tied=False,
        width=72,
        heads=6,
        kv_heads=2,
        vision_heads=4,
    ),
    "grid27_odd_pixels": CheckpointSpec(
        family="idefics3", image_size=83, patch_size=3, scale_factor=3, splitting=False, heads=4, kv_heads=4
    ),
    "grid14_mqa_unsplit": CheckpointSpec(
        family="idefics3", image_size=70, patch_size=5, heads=8, kv_heads=1, head_dim=8, splitting=False
    ),
    "grid19_rounded_buckets": CheckpointSpec(
        image_size=77, patch_size=4, scale_factor=1, vision_heads=6, max_tiles_per_side=2, tied=False
    ),
    "grid5_scale5_wide_head": CheckpointSpec(
        image_size=65,
        patch_size=13,
        scale_factor=5,
        vision_heads=1,
        width=96,
        heads=3,
        kv_heads=1,
        head_dim=32,
    ),
    "grid6_qwen2_sharded": CheckpointSpec(
        image_size=60, patch_size=10, scale_factor=3, text_type="qwen2", shard_size="60KB"
    ),
    "grid8_qwen3_untied_erf": CheckpointSpec(
        family="idefics3",
        image_size=72,
        patch_size=9,
        scale_factor=4,
        text_type="qwen3",
        tied=False,
        width=72,
        heads=6,
        kv_heads=3,
        head_dim=24,
        vision_act="gelu",
    ),
    "grid9_mistral": CheckpointSpec(
        image_size=99, patch_size=11, scale_factor=3, text_type="mistral", text_extra={"sliding_window": None}
    ),
    "grid4_llama_bias": CheckpointSpec(
        image_size=66,
        patch_size=16,
        scale_factor=4,
        image_mean=0.45,
        image_std=0.27,
        text_extra={"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-6},
    ),
}


def random_checkpoint(directory: Path, seed: int, **overrides: Any) -> Path:
    """Writes a complete checkpoint under `directory` and returns its path.

    `spec=` takes a CheckpointSpec (default: the plain one); other keywords override its fields.
    """
    spec = replace(overrides.pop("spec", CheckpointSpec()), **overrides)
    model = random_model(spec, seed)
    target = directory / f"checkpoint-{seed}"
    logging.disable_progress_bar()
    model.to(spec.dtype).save_pretrained(target, max_shard_size=spec.shard_size)
    for name in COPIED:
        shutil.copyfile(DEFAULT_MODEL / name, target / name)
    _write_processor(target, spec)
    return target


def random_model(spec: CheckpointSpec, seed: int) -> Any:
    """The reference model of a spec, float32, in evaluation mode."""
    seeded = json.loads((DEFAULT_MODEL / "config.json").read_text())
    config_class, model_class = {
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    }[spec.family]
    text = {
        "hidden_size": spec.width,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": 1e-5,
    }
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        text[key] = seeded["text_config"][key]
    config = config_class(
        text_config=AutoConfig.for_model(spec.text_type, **(text | spec.text_extra)),
        vision_config={
            "hidden_size": spec.vision_width,
            "intermediate_size": spec.vision_intermediate,
            "num_hidden_layers": spec.vision_layers,
            "num_attention_heads": spec.vision_heads,
            "image_size": spec.image_size,
            "patch_size": spec.patch_size,
            "hidden_act": spec.vision_act,
        },
        scale_factor=spec.scale_factor,
        image_token_id=seeded["image_token_id"],
        tie_word_embeddings=spec.tied,
    )
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    _draw_weights(model, generator)
    _scale_to_gap(model, spec, generator)
    return model


def reference(directory: Path) -> Any:
    """What `transformers` makes of a checkpoint: float32, evaluation mode, plain attention."""
    family = json.loads((directory / "config.json").read_text())["model_type"]
    model_class = {"smolvlm": SmolVLMForConditionalGeneration, "idefics3": Idefics3ForConditionalGeneration}[
        family
    ]
    logging.disable_progress_bar()
    return model_class.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def top_two_gap(model: Any, spec: CheckpointSpec, generator: torch.Generator) -> float:
    """Median gap of the top two logits over 64 text positions behind one random tile."""
    image_token = model.config.image_token_id
    text = torch.randint(0, image_token - 10, (64,), generator=generator)
    ids = torch.cat([torch.full((spec.tokens_per_tile,), image_token), text])[None]
    pixels = torch.rand(1, 1, 3, spec.image_size, spec.image_size, generator=generator) * 2 - 1
    top = model(input_ids=ids, pixel_values=pixels).logits[0, -64:].topk(2).values
    return float((top[:, 0] - top[:, 1]).median())


def _draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Norm weights near one, other vectors small, embeddings of unit scale, matrices scaled by fan-in."""
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            mean, std = (1.0, 0.2) if name.endswith("weight") else (0.0, 0.2)
        elif "embed_tokens" in name:  # below the layers' scale: tied logits must not just echo their token
            mean, std = 0.0, 0.3
        elif "position_embedding" in name:
            mean, std = 0.0, 1.0
        else:
            mean, std = 0.0, weight[0].numel() ** -0.5
        weight.data.copy_(noise * std + mean)


def _scale_to_gap(model: Any, spec: CheckpointSpec, generator: torch.Generator) -> None:
    gap = top_two_gap(model, spec, generator)
    model.model.text_model.norm.weight.data.mul_(TARGET_GAP / gap)


def _write_processor(target: Path, spec: CheckpointSpec) -> None:
    processor = json.loads((DEFAULT_MODEL / "processor_config.json").read_text())
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer_config.json").read_text())
    prefix = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[spec.family]
    images = processor["image_processor"]
    images |= {
        "image_processor_type": f"{prefix}ImageProcessor",
        "do_image_splitting": spec.splitting,
        "image_mean": [spec.image_mean] * 3,
        "image_std": [spec.image_std] * 3,
        "max_image_size": {"longest_edge": spec.image_size},
        "size": {"longest_edge": spec.image_size * spec.max_tiles_per_side},
    }
    processor |= {"image_seq_len": spec.tokens_per_tile, "processor_class": f"{prefix}Processor"}
    if spec.family == "idefics3":
        del processor["video_processor"]
    else:
        for key in ("size", "max_image_size"):
            processor["video_processor"][key] = {"longest_edge": spec.image_size}
    tokenizer |= {"processor_class": f"{prefix}Processor", "model_max_length": spec.max_positions}
    (target / "processor_config.json").write_text(json.dumps(processor, indent=2))
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
