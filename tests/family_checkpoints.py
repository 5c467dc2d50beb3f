"""Random small checkpoints of every family: see `checkpoint_case`. Those that keep images' own sizes are in
`own_size_checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from checkpoint_case import (
    CHATML,
    QWEN2,
    QWEN3,
    TEXT,
    FamilyCase,
    make_checkpoint,
    reference,
    sentencepiece_like,
)
from own_size_checkpoints import OWN_SIZE_CASES
from packed_checkpoints import PACKED_CASES

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


CASES: tuple[FamilyCase, ...] = (
    *OWN_SIZE_CASES,
    *PACKED_CASES,
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

__all__ = ["CASES", "CHATML", "DOCLING", "DOCTAGS", "FamilyCase", "make_checkpoint", "reference"]
