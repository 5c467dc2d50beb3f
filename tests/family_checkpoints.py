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


# Idefics3

ROLES = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
DOCTAGS = (
    *("<doctag>", "</doctag>", "<text>", "</text>", "<otsl>", "</otsl>", "<fcel>", "<nl>", "<key_"),
    *(f"<loc_{i}>" for i in range(20)),
)


def idefics3_case(
    name: str, kind: str, text: Mapping[str, Any], template: str, specials: tuple[str, ...], **more: Any
) -> FamilyCase:
    """Markers of tiles beyond the second row and column are plain text, as for large pages on hubs."""

    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": kind.lower(),
            "text_config": {**TEXT, "vocab_size": vocab_size, "pad_token_id": 0, **text},
            "vision_config": {
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "intermediate_size": 80,
                "image_size": 32,
                "patch_size": 8,
            },
            "scale_factor": 2,
            "image_token_id": ids["<image>"],
            "pad_token_id": 0,
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        }

    tiles = {"longest_edge": 32}
    return FamilyCase(
        name=name,
        config=config,
        specials=(
            *("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
            *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
            *specials,
        ),
        named={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        processor={
            "processor_class": f"{kind}Processor",
            "image_seq_len": 4,
            "image_processor": {
                "image_processor_type": f"{kind}ImageProcessor",
                "do_image_splitting": True,
                "max_image_size": tiles,
                "size": {"longest_edge": 128},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 1,
            },
            **more,
        },
        template=template,
    )


LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 16}
DOCLING = idefics3_case(
    "idefics3_docling",
    "Idefics3",
    LLAMA | {"tie_word_embeddings": True},
    ROLES,
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", *DOCTAGS),
)


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


# Gemma 3

GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{% set ms = messages[1:] %}"
    "{% set c = messages[0].content %}{% set first = (c if c is string else c[0].text) + '\n\n' %}"
    "{% else %}{% set ms = messages %}{% set first = '' %}{% endif %}"
    "{% for m in ms %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def gemma3_case(name: str, **text: Any) -> FamilyCase:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "gemma3",
            "text_config": {
                **TEXT,
                "vocab_size": vocab_size,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "query_pre_attn_scalar": 24,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 40,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
                },
                **text,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "intermediate_size": 80,
                "image_size": 56,
                "patch_size": 7,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 16,
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "image_token_index": ids["<image_soft_token>"],
        }

    def draw(name: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor | None:
        if name.endswith("mm_input_projection_weight"):
            return noise * weight.shape[0] ** -0.5
        if weight.dim() == 1 and ("language_model" in name or "mm_soft_emb_norm" in name):
            return noise * 0.2  # of 1 + w
        return None

    return FamilyCase(
        name=name,
        config=config,
        specials=(
            *("<bos>", "<start_of_turn>", "<end_of_turn>"),
            *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        ),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        processor={
            "processor_class": "Gemma3Processor",
            "image_seq_length": 16,
            "image_processor": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 56, "width": 56},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 2,
                "pan_and_scan_min_crop_size": 20,
                "pan_and_scan_max_num_crops": 4,
                "pan_and_scan_min_ratio_to_activate": 1.2,
            },
        },
        template=GEMMA,
        draw=draw,
        old_names={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
        tokenizer=sentencepiece_like,
        norm_offset=1.0,
    )


# LightOnOCR

PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "image_size": 112,
    "patch_size": 7,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}


def pixtral_processor(**settings: Any) -> dict[str, Any]:
    return {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, **settings}


def lighton_ocr_case(name: str, multiple: int, **text: Any) -> FamilyCase:
    """multiple: pixels that the processor rounds up to; a cell has 14."""

    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "lighton_ocr",
            "text_config": {**TEXT, **QWEN3, "vocab_size": vocab_size, **text},
            "vision_config": PIXTRAL,
            "image_token_id": ids["<|image_pad|>"],
            "tie_word_embeddings": True,
        }

    return FamilyCase(
        name=name,
        config=config,
        specials=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        processor={
            "processor_class": "LightOnOcrProcessor",
            "patch_size": 7,
            "image_processor": pixtral_processor(patch_size={"height": multiple, "width": multiple}),
        },
        template=CHATML.replace("IMAGE", "<|image_pad|>"),
        takes=lambda width, height: min(width, height) / max(1, max(width, height) / 112) >= 8,
    )


# Qwen2-VL and Qwen2.5-VL

MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 4, 3]}
QWEN_TEXT = {**TEXT, "num_key_value_heads": 2, "rope_parameters": MROPE}
QWEN_VISION = {
    "depth": 3,
    "num_heads": 3,
    "patch_size": 7,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
QWEN2_VISION = {**QWEN_VISION, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}
QWEN2_5_VISION = {
    **QWEN_VISION,
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "window_size": 28,
    "fullatt_block_indexes": [1],
}


def patches_in_place(merge: int, patch: int) -> Callable[[Any], torch.Tensor]:
    """Pixels of one image out of patches that lie cell by cell; both frames are the same."""

    def pixels(inputs: Any) -> torch.Tensor:
        _, rows, cols = inputs["image_grid_thw"][0].tolist()
        patches = inputs["pixel_values"].view(rows // merge, cols // merge, merge, merge, 3, 2, patch, patch)
        assert torch.equal(patches[..., 0, :, :], patches[..., 1, :, :])
        image = patches[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6)
        return image.reshape(1, 3, rows * patch, cols * patch)

    return pixels


def qwen_case(
    name: str, model_type: str, vision: Mapping[str, Any], text: Mapping[str, Any], tied: bool, patch: int = 7
) -> FamilyCase:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": model_type,
            "text_config": {**text, "vocab_size": vocab_size},
            "vision_config": dict(vision),
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": tied,
        }

    processor = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 60 * (2 * patch) ** 2}
    return FamilyCase(
        name=name,
        config=config,
        specials=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        processor={
            "processor_class": "Qwen2_5_VLProcessor" if model_type == "qwen2_5_vl" else "Qwen2VLProcessor",
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **processor},
            "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", "size": size, **processor},
        },
        template=CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        old_names={"model.language_model.": "model.", "model.visual.": "visual."},
        takes=lambda width, height: max(width, height) <= 200 * min(width, height),
        pixels=patches_in_place(2, patch),
    )


CASES: tuple[FamilyCase, ...] = (
<<<<<<< HEAD
    qwen_case("qwen2_vl", "qwen2_vl", QWEN2_VISION, QWEN_TEXT, tied=True),
    qwen_case("qwen2_5_vl_untied", "qwen2_5_vl", QWEN2_5_VISION, QWEN_TEXT, tied=False),
=======
    DOCLING,
    idefics3_case(
        "smolvlm_untied",
        "SmolVLM",
        LLAMA | {"num_key_value_heads": 1},
        CHATML.replace("IMAGE", "<image>"),
        ("<video>",),
        video_processor={
            "video_processor_type": "SmolVLMVideoProcessor",
            "max_image_size": {"longest_edge": 32},
            "size": {"longest_edge": 32},
            "num_frames": 8,
            "fps": 1,
        },
    ),
>>>>>>> main
    lighton_ocr_case("lighton_ocr", 14),
    lighton_ocr_case("lighton_ocr_odd_patches", 7, rms_norm_eps=1e-3),
    gemma3_case("gemma3_wide_window"),
    gemma3_case("gemma3_window_cuts_the_span", sliding_window=12, num_key_value_heads=4),
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
