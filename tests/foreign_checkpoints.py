"""Random small checkpoints of models that no family claims: a prefix that sees itself (PaliGemma), layers
that attend to the image from aside (Llama 3.2 Vision), images of many crops in one group (Molmo 2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint_case import CHATML, TEXT, FamilyCase, make_checkpoint, sentencepiece_like

MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def paligemma_config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "paligemma",
        # as its processor adds the tokens of places and segments
        "text_config": {
            **TEXT, "model_type": "gemma", "vocab_size": vocab_size + 1152, "head_dim": 16,
            "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh",
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 3, "intermediate_size": 80, "image_size": 28, "patch_size": 7,
            "projection_dim": 64, "vision_use_head": False,
        },
        "image_token_index": ids["<image>"],
        "projection_dim": 64,
    }  # fmt: skip


def mllama_config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "mllama",
        "text_config": {
            **TEXT, "vocab_size": vocab_size, "num_hidden_layers": 3, "num_key_value_heads": 2,
            "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_config": {
            "hidden_size": 48, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 3,
            "intermediate_size": 80, "vision_output_dim": 96, "image_size": 28, "patch_size": 7,
            "intermediate_layers_indices": [0], "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "image_token_index": ids["<|image|>"],
    }  # fmt: skip


def molmo2_config(ids: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "molmo2",
        "text_config": {
            **TEXT, "vocab_size": ids["<im_start>"], "head_dim": 16, "num_key_value_heads": 2,
            "additional_vocab_size": vocab_size - ids["<im_start>"],
        },
        "vision_config": {
            "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
            "head_dim": 16, "intermediate_size": 80, "image_size": [28, 28], "patch_size": 7,
        },
        "adapter_config": {
            "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16,
            "intermediate_size": 80, "text_hidden_size": 64, "vision_feature_layer": [1, 0],
        },
        "image_start_token_id": ids["<im_start>"],
        "low_res_image_start_token_id": ids["<low_res_im_start>"],
        "image_end_token_id": ids["<im_end>"],
        "image_patch_id": ids["<im_patch>"],
        "frame_start_token_id": ids["<frame_start>"],
        "frame_end_token_id": ids["<frame_end>"],
    }  # fmt: skip


def gates_open(name: str, weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor | None:
    """Llama 3.2 Vision is drawn with its gates at zero: its images would say nothing."""
    return weight * 0 + 1.0 if "gate" in name and weight.numel() == 1 else None


PALIGEMMA = FamilyCase(
    name="paligemma",
    config=paligemma_config,
    specials=("<bos>", "<image>"),
    named={"image_token": "<image>"},
    processor={
        "processor_class": "PaliGemmaProcessor",
        "image_processor": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_seq_length": 16,
            **MEAN,
        },
    },
    template="",
    tokenizer=sentencepiece_like,
    norm_offset=1.0,
)
MLLAMA = FamilyCase(
    name="mllama",
    config=mllama_config,
    specials=("<|begin_of_text|>", "<|python_tag|>", "<|image|>"),
    named={"image_token": "<|image|>"},
    processor={
        "processor_class": "MllamaProcessor",
        "image_processor": {
            "image_processor_type": "MllamaImageProcessor",
            "size": {"height": 28, "width": 28},
            "max_image_tiles": 4,
            **MEAN,
        },
    },
    template="{{ bos_token }}" + CHATML.replace("IMAGE", "<|image|>"),
    draw=gates_open,
)
MOLMO2 = FamilyCase(
    name="molmo2",
    config=molmo2_config,
    specials=(
        *("<|image|>", "<|video|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>"),
        *("<low_res_im_start>", "<frame_start>", "<frame_end>", "<im_low>"),
    ),
    named={"image_token": "<|image|>", "video_token": "<|video|>"},
    processor={
        "processor_class": "Molmo2Processor",
        "image_processor": {
            "image_processor_type": "Molmo2ImageProcessor",
            "size": {"height": 28, "width": 28},
            "patch_size": 7,
            "max_crops": 4,
            "overlap_margins": [1, 1],
            "pooling_size": [2, 2],
        },
        "video_processor": {"video_processor_type": "Molmo2VideoProcessor", "patch_size": 7},
    },
    template=CHATML.replace("IMAGE", "<|image|>"),
)
FOREIGN_CASES = (PALIGEMMA, MLLAMA, MOLMO2)
BOS = {"paligemma": "<bos>", "mllama": "<|begin_of_text|>", "molmo2": "<|endoftext|>"}


def make_foreign(case: FamilyCase, directory: Path) -> Path:
    make_checkpoint(case, directory, seed=5)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": BOS[case.name]}))
    if not case.template:
        (directory / "chat_template.jinja").unlink()
    return directory
