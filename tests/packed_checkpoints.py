"""Random small checkpoints of the families that pack an image's visual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from checkpoint_case import CHATML, QWEN2, TEXT, FamilyCase

CANVASES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84], [84, 56]]
TOWER = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "image_size": 28,
    "patch_size": 7,
}
CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}


def survives(width: int, height: int) -> bool:
    """The reference takes no image so thin that nothing of it is left on any canvas."""
    return any(
        int(width * scale) and int(height * scale)
        for high, wide in CANVASES
        for scale in [min(wide / width, high / height)]
    )


def whole_image_last(inputs: Any) -> torch.Tensor:
    tiles = inputs["pixel_values"][0]
    return torch.cat((tiles[1:], tiles[:1]))


def llava_next_case(
    name: str, text: Mapping[str, Any], vision: Mapping[str, Any], strategy: str, **more: Any
) -> FamilyCase:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "llava_next",
            "text_config": {**TEXT, "vocab_size": vocab_size, "num_key_value_heads": 2, **text},
            "vision_config": dict(vision),
            "image_token_index": ids["<image>"],
            "vision_feature_select_strategy": strategy,
            "image_grid_pinpoints": CANVASES,
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
            **more,
        }

    return FamilyCase(
        name=name,
        config=config,
        specials=("<image>",),
        named={"image_token": "<image>"},
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": strategy,
            "num_additional_image_tokens": int(strategy == "default"),
            "image_token": "<image>",
            "image_processor": {
                "image_processor_type": "LlavaNextImageProcessor",
                "size": {"shortest_edge": 28},
                "crop_size": {"height": 28, "width": 28},
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711],
                "image_grid_pinpoints": CANVASES,
                "resample": 3,
            },
        },
        template=CHATML.replace("IMAGE", "<image>\n"),
        old_names={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.image_newline": "image_newline",
            "lm_head.": "language_model.lm_head.",
        },
        row_scale=float(text.get("embedding_multiplier", 1.0)),
        logit_scale=1 / float(text.get("logits_scaling", 1.0)),
        takes=survives,
        pixels=whole_image_last,
    )


IMAGES_FIRST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def onevision_case(name: str, most_tiles: int, **text: Any) -> FamilyCase:
    plain = llava_next_case(name, {**QWEN2, **text}, SIGLIP, "full")
    aspect = f"anyres_max_{most_tiles}"

    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        more = {"model_type": "llava_onevision", "vision_aspect_ratio": aspect, "vision_feature_layer": -1}
        return plain.config(ids, vocab_size) | more | {"video_token_index": ids["<video>"]}

    pixels = {"size": {"height": 28, "width": 28}, "image_mean": [0.2, 0.5, 0.7], "resample": 3}
    return replace(
        plain,
        config=config,
        specials=("<image>", "<video>"),
        named={"image_token": "<image>", "video_token": "<video>"},
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": aspect,
            "image_processor": {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "image_std": [0.5, 0.4, 0.3],
                "image_grid_pinpoints": CANVASES,
                **pixels,
            },
            "video_processor": {"video_processor_type": "LlavaOnevisionVideoProcessor", **pixels},
        },
        template=IMAGES_FIRST,
        nested=True,
    )


PACKED_CASES = (
    onevision_case("llava_onevision", 2, tie_word_embeddings=True),
    onevision_case("llava_onevision_wide", 9),
    llava_next_case("llava_next_mistral", {"model_type": "mistral", "sliding_window": None}, CLIP, "default"),
    llava_next_case(
        "granite_vision",
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        SIGLIP,
        "full",
        vision_feature_layer=[-4, -2, -1],
    ),
)
