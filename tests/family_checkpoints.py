"""Random small checkpoints of every family, complete directories that transformers itself reads.

Each case draws its weights so that no part of the network is silent, and keeps the traps of its family away
from their defaults: norms off one, position tables and class tokens off zero, shapes that tell height from
width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fidelity import DEFAULT_MODEL, TARGET_GAP
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, "max_window_layers": 28}
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class FamilyCase:
    """A family's shape to test: its config, tokenizer, processor, and how its weights are drawn."""

    name: str
    config: Callable[[Mapping[str, int], int], dict[str, Any]]  # special token ids and vocabulary size
    specials: tuple[str, ...]
    named: Mapping[str, str]  # tokenizer attributes that the processor reads
    processor: Mapping[str, Any]
    template: str
    draw: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None] = lambda name, weight, noise: None
    old_names: Mapping[str, str] = field(default_factory=dict)  # prefix of the newest form: of an older one


@cache
def byte_level(specials: tuple[str, ...]) -> str:
    """tokenizer.json of a small byte-level BPE trained on this repository's own text, specials at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(DEFAULT_MODEL.parent / "pipeline.py")], trainer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer.to_str()


def make_checkpoint(case: FamilyCase, directory: Path, seed: int, *, original_format: bool = True) -> Path:
    """Writes a whole checkpoint and returns its folder. original_format: names as hubs keep them."""
    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *case.specials)
    text = byte_level(specials)
    tokenizer = Tokenizer.from_str(text)
    ids = {name: tokenizer.token_to_id(name) for name in specials}
    values = case.config(ids, tokenizer.get_vocab_size())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    draw_weights(model, case, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(directory, save_original_format=original_format)
    (directory / "tokenizer.json").write_text(text)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "extra_special_tokens": dict(case.named),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "processor_config.json").write_text(json.dumps(case.processor))
    (directory / "chat_template.jinja").write_text(case.template)
    return directory


def draw_weights(model: nn.Module, case: FamilyCase, generator: torch.Generator) -> None:
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        drawn = case.draw(name, weight.data, noise)
        if drawn is None:
            drawn = default_draw(name, weight.data, noise)
        weight.data.copy_(drawn)
    scale_to_gap(model, generator)


def default_draw(name: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Norms near one, biases small, embeddings of unit scale, matrices scaled by fan-in."""
    if weight.dim() == 1:
        return noise * 0.2 + float(name.endswith("weight"))
    if "embed_tokens" in name:  # below the layers' scale: tied logits must not just echo their token
        return noise * 0.3
    if "position" in name or weight.shape[0] == 1:
        return noise
    return noise * weight[0].numel() ** -0.5


@torch.no_grad()
def scale_to_gap(model: Any, generator: torch.Generator) -> None:
    """Scales the last norm so that the median gap of the top two logits is TARGET_GAP."""
    ids = torch.randint(0, 380, (1, 64), generator=generator)
    top = model(input_ids=ids).logits[0].topk(2).values
    norm = model.get_decoder().norm if hasattr(model, "get_decoder") else model.language_model.norm
    norm.weight.data.mul_(TARGET_GAP / float((top[:, 0] - top[:, 1]).median()))


def reference(directory: Path) -> Any:
    logging.disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


# InternVL


def internvl(text: Mapping[str, Any], **vision: Any) -> Callable[[Mapping[str, int], int], dict[str, Any]]:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "internvl",
            "text_config": {**TEXT, "vocab_size": vocab_size, **text},
            "vision_config": {
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "intermediate_size": 80,
                "attention_bias": True,
                "image_size": [28, 28],
                "patch_size": [7, 7],
                **vision,
            },
            "image_token_id": ids["<IMG_CONTEXT>"],
            "image_seq_length": 4,
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        }

    return config


def internvl_case(name: str, text: Mapping[str, Any], **vision: Any) -> FamilyCase:
    return FamilyCase(
        name=name,
        config=internvl(text, **vision),
        specials=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={
            "processor_class": "InternVLProcessor",
            "image_seq_length": 4,
            "image_processor": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": {"height": 28, "width": 28},
                "image_mean": [0.485, 0.456, 0.406],
                "image_std": [0.229, 0.224, 0.225],
            },
            "video_processor": {
                "video_processor_type": "InternVLVideoProcessor",
                "size": {"height": 28, "width": 28},
            },
        },
        template=CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
        old_names={"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    )


CASES: tuple[FamilyCase, ...] = (
    internvl_case("internvl_300m_qwen2", QWEN2 | {"tie_word_embeddings": True}),
    internvl_case("internvl_300m_qwen3_untied", QWEN3),
    internvl_case(
        "internvl_6b_norms",
        QWEN2,
        norm_type="rms_norm",
        attention_bias=False,
        use_qk_norm=True,
        use_mean_pooling=False,
    ),
)
