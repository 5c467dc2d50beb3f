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
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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
    tokenizer: Callable[[tuple[str, ...]], str] = lambda specials: byte_level(specials)
    norm_offset: float = 0.0  # added to the last norm's weight by the model itself
    row_scale: float = 1.0  # on visual tokens here, which the reference multiplies in its decoder
    logit_scale: float = 1.0  # which the decoder's own class has, and the reference forgets around it
    nested: bool = False  # the processor tells one image from many where they are a list of lists
    takes: Callable[[int, int], bool] = lambda width, height: True  # sizes that the reference can take
    pixels: Callable[[Any], torch.Tensor] = lambda inputs: inputs["pixel_values"]  # [tiles, 3, H, W]


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


@cache
def sentencepiece_like(specials: tuple[str, ...]) -> str:
    """As Gemma's: spaces seen, bytes to fall back on, runs of line feeds merged into tokens of their own."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\n▁abcdefghilmnoprstuvwy.?!"]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n\n", "\n"), ("▁", "t"), ("▁t", "h"), ("i", "s"), ("o", "r")]
    pieces += dict.fromkeys("".join(pair) for pair in merges)
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(list(specials))
    return tokenizer.to_str()


def make_checkpoint(case: FamilyCase, directory: Path, seed: int, *, original_format: bool = True) -> Path:
    """Writes a whole checkpoint and returns its folder. original_format: names as hubs keep them."""
    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *case.specials)
    text = case.tokenizer(specials)
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
    scale_to_gap(model, case.norm_offset, generator)


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
def scale_to_gap(model: Any, offset: float, generator: torch.Generator) -> None:
    """Scales the last norm so that the median gap of the top two logits is TARGET_GAP."""
    ids = torch.randint(0, 250, (1, 64), generator=generator)
    types = {"token_type_ids": torch.zeros_like(ids)} if model.config.model_type == "gemma3" else {}
    top = model(input_ids=ids, **types).logits[0].topk(2).values
    norm = model.get_decoder().norm if hasattr(model, "get_decoder") else model.language_model.norm
    scale = TARGET_GAP / float((top[:, 0] - top[:, 1]).median())
    norm.weight.data.add_(offset).mul_(scale).sub_(offset)


def reference(directory: Path) -> Any:
    logging.disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
