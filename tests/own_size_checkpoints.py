"""Small checkpoints of families whose images keep their own size: see `checkpoint_case`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from checkpoint_case import CHATML, QWEN3, TEXT, FamilyCase

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

    family = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[model_type]
    video = "Qwen3VL" if model_type == "qwen3_vl" else "Qwen2VL"
    processor = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 60 * (2 * patch) ** 2}
    return FamilyCase(
        name=name,
        config=config,
        specials=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        processor={
            "processor_class": f"{family}Processor",
            "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **processor},
            "video_processor": {"video_processor_type": f"{video}VideoProcessor", "size": size, **processor},
        },
        template=CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        old_names={"model.language_model.": "model.", "model.visual.": "visual."},
        takes=lambda width, height: max(width, height) <= 200 * min(width, height),
        pixels=patches_in_place(2, patch),
    )


QWEN3_VISION = {
    **QWEN_VISION,
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_VL_TEXT = {
    **TEXT,
    **QWEN3,
    "num_hidden_layers": 3,
    "rope_parameters": {**MROPE, "mrope_section": [4, 3, 1]},
}

# PaddleOCR-VL


def rows_of_patches(patch: int) -> Callable[[Any], torch.Tensor]:
    """Pixels of one image out of patches [n, 3, patch, patch] in reading order."""

    def pixels(inputs: Any) -> torch.Tensor:
        _, rows, cols = inputs["image_grid_thw"][0].tolist()
        image = inputs["pixel_values"].view(rows, cols, 3, patch, patch).permute(2, 0, 3, 1, 4)
        return image.reshape(1, 3, rows * patch, cols * patch)

    return pixels


def paddle_case(name: str, use_bias: bool) -> FamilyCase:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        return {
            "model_type": "paddleocr_vl",
            "text_config": {
                **QWEN_TEXT,
                "vocab_size": vocab_size,
                "head_dim": 16,
                "use_bias": use_bias,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "image_size": 35,
                "patch_size": 7,
                "spatial_merge_size": 2,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
            },
            "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|IMAGE_START|>"],
            "vision_end_token_id": ids["<|IMAGE_END|>"],
            "tie_word_embeddings": True,
        }

    return FamilyCase(
        name=name,
        config=config,
        specials=("<|IMAGE_PLACEHOLDER|>", "<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        processor={
            "processor_class": "PaddleOCRVLProcessor",
            "image_processor": {
                "image_processor_type": "PaddleOCRVLImageProcessor",
                "size": {"shortest_edge": 4 * 14**2, "longest_edge": 60 * 14**2},
                "patch_size": 7,
                "merge_size": 2,
                "temporal_patch_size": 1,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            },
        },
        template=CHATML.replace("IMAGE", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
        old_names={
            "model.language_model.": "model.",
            "model.visual.": "visual.",
            "model.projector.": "mlp_AR.",
        },
        takes=lambda width, height: max(width, height) <= 100 * min(width, height),
        pixels=rows_of_patches(7),
    )


# Mistral 3 and Pixtral


MINISTRAL3 = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.1,
    },
}


def break_case(
    name: str, model_type: str, merge: int, more: Mapping[str, Any] | None = None, **settings: Any
) -> FamilyCase:
    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        text = {**TEXT, "model_type": "mistral", "num_key_value_heads": 2, "head_dim": 24, **(more or {})}
        return {
            "model_type": model_type,
            "text_config": {**text, "vocab_size": vocab_size, "sliding_window": None},
            "vision_config": {**PIXTRAL, "hidden_act": "gelu"},
            "image_token_index": ids["[IMG]"],
            "vision_feature_layer": -1,
            **settings,
        }

    return FamilyCase(
        name=name,
        config=config,
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        named={"image_token": "[IMG]"},
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 7,
            "spatial_merge_size": merge,
            "image_processor": pixtral_processor(patch_size={"height": 7, "width": 7}),
        },
        template=CHATML.replace("IMAGE", "[IMG]"),
        old_names={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
        },
        takes=lambda width, height: min(width, height) / max(1, max(width, height) / 112) >= 8,
    )


def glm_ocr_case(name: str, has_bias: bool, tied: bool) -> FamilyCase:
    like = qwen_case(name, "qwen2_vl", {}, {}, tied)

    def config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
        return {
            "model_type": "glm_ocr",
            "text_config": {
                **TEXT,
                "vocab_size": vocab_size,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rope_parameters": {**rope, "mrope_section": [4, 3, 1]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 48,
                "num_heads": 3,
                "intermediate_size": 80,
                "out_hidden_size": 64,
                "patch_size": 7,
                "attention_bias": has_bias,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
            },
            "image_token_id": ids["<|image|>"],
            "video_token_id": ids["<|video|>"],
            "image_start_token_id": ids["<|begin_of_image|>"],
            "image_end_token_id": ids["<|end_of_image|>"],
            "video_start_token_id": ids["<|begin_of_video|>"],
            "video_end_token_id": ids["<|end_of_video|>"],
            "tie_word_embeddings": tied,
        }

    pixels = {
        "size": {"shortest_edge": 8 * 14**2, "longest_edge": 120 * 14**2},
        "patch_size": 7,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    kinds = ("image", "video")
    return replace(
        like,
        config=config,
        specials=tuple(f"<|{part}{kind}|>" for kind in kinds for part in ("", "begin_of_", "end_of_")),
        named={f"{kind}_token": f"<|{kind}|>" for kind in kinds},
        processor={
            "processor_class": "Glm46VProcessor",
            "image_processor": {"image_processor_type": "Glm46VImageProcessor", **pixels},
            "video_processor": {"video_processor_type": "Glm46VVideoProcessor", **pixels},
        },
        template=CHATML.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>"),
    )


OWN_SIZE_CASES = (
    break_case("mistral3", "mistral3", 2, tie_word_embeddings=False, spatial_merge_size=2),
    break_case("mistral3_biases", "mistral3", 2, tie_word_embeddings=True, multimodal_projector_bias=True),
    break_case("ministral3", "mistral3", 2, MINISTRAL3, tie_word_embeddings=True),
    break_case("pixtral", "llava", 1, vision_feature_select_strategy="full"),
    paddle_case("paddleocr_vl", use_bias=False),
    paddle_case("paddleocr_vl_biases", use_bias=True),
    qwen_case("qwen3_vl", "qwen3_vl", QWEN3_VISION, QWEN3_VL_TEXT, tied=True),
    glm_ocr_case("glm_ocr", has_bias=True, tied=False),
    glm_ocr_case("glm_ocr_tied_without_biases", has_bias=False, tied=True),
    qwen_case("qwen2_vl", "qwen2_vl", QWEN2_VISION, QWEN_TEXT, tied=True),
    qwen_case("qwen2_5_vl_untied", "qwen2_5_vl", QWEN2_5_VISION, QWEN_TEXT, tied=False),
    lighton_ocr_case("lighton_ocr", 14),
    lighton_ocr_case("lighton_ocr_odd_patches", 7, rms_norm_eps=1e-3),
)
