"""Checkpoints of given sizes with random weights: what is measured on them depends on shapes alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm.config import DEFAULT_MODEL

COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Decoder and tower of a SmolVLM-family model."""

    d_model: int = 64
    d_ff: int = 128
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    vocab_size: int = 626
    max_positions: int = 2048
    tied: bool = True
    vision_width: int = 48
    vision_ff: int = 96
    vision_layers: int = 2
    vision_heads: int = 2
    image_size: int = 64  # pixels, square tiles
    patch_size: int = 16
    reduction: int = 2  # patches joined per side
    longest_edge: int = 64  # of the tiling rule


SMOLVLM_256M = Sizes(
    d_model=576,
    d_ff=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49280,
    max_positions=8192,
    tied=False,
    vision_width=768,
    vision_ff=3072,
    vision_layers=12,
    vision_heads=12,
    image_size=512,
    reduction=4,
    longest_edge=2048,
)


def write_checkpoint(directory: Path, sizes: Sizes) -> Path:
    """A Hugging Face directory in bfloat16 with the default model's tokenizer; returns the directory."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(Path(DEFAULT_MODEL) / name, directory / name)
    (directory / "config.json").write_text(json.dumps(_config(sizes), indent=2))
    (directory / "processor_config.json").write_text(json.dumps(_processor(sizes), indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in _tensors(sizes).items():
        if len(shape) > 1:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        else:
            values = torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _config(s: Sizes) -> dict[str, Any]:
    default = json.loads((Path(DEFAULT_MODEL) / "config.json").read_text())
    text = {
        **default["text_config"],
        "hidden_size": s.d_model,
        "intermediate_size": s.d_ff,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab_size,
        "max_position_embeddings": s.max_positions,
        "tie_word_embeddings": s.tied,
    }
    vision = {
        **default["vision_config"],
        "hidden_size": s.vision_width,
        "intermediate_size": s.vision_ff,
        "num_hidden_layers": s.vision_layers,
        "num_attention_heads": s.vision_heads,
        "image_size": s.image_size,
        "patch_size": s.patch_size,
    }
    outer = {"text_config": text, "vision_config": vision, "scale_factor": s.reduction}
    return {**default, **outer, "tie_word_embeddings": s.tied}


def _processor(s: Sizes) -> dict[str, Any]:
    default = json.loads((Path(DEFAULT_MODEL) / "processor_config.json").read_text())
    image = {
        **default["image_processor"],
        "size": {"longest_edge": s.longest_edge},
        "max_image_size": {"longest_edge": s.image_size},
    }
    per_side = s.image_size // s.patch_size // s.reduction
    return {**default, "image_processor": image, "image_seq_len": per_side**2}


def _tensors(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Names as `transformers` writes them."""
    query, cache = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    text, vision = "model.text_model.", "model.vision_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{text}embed_tokens.weight": (s.vocab_size, s.d_model),
        f"{text}norm.weight": (s.d_model,),
        "model.connector.modality_projection.proj.weight": (
            s.d_model,
            s.vision_width * s.reduction * s.reduction,
        ),
        f"{vision}embeddings.patch_embedding.weight": (s.vision_width, 3, s.patch_size, s.patch_size),
        f"{vision}embeddings.patch_embedding.bias": (s.vision_width,),
        f"{vision}embeddings.position_embedding.weight": (
            (s.image_size // s.patch_size) ** 2,
            s.vision_width,
        ),
        f"{vision}post_layernorm.weight": (s.vision_width,),
        f"{vision}post_layernorm.bias": (s.vision_width,),
    }
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocab_size, s.d_model)
    for i in range(s.num_layers):
        layer = f"{text}layers.{i}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (query, s.d_model),
            f"{layer}self_attn.k_proj.weight": (cache, s.d_model),
            f"{layer}self_attn.v_proj.weight": (cache, s.d_model),
            f"{layer}self_attn.o_proj.weight": (s.d_model, query),
            f"{layer}mlp.gate_proj.weight": (s.d_ff, s.d_model),
            f"{layer}mlp.up_proj.weight": (s.d_ff, s.d_model),
            f"{layer}mlp.down_proj.weight": (s.d_model, s.d_ff),
            f"{layer}input_layernorm.weight": (s.d_model,),
            f"{layer}post_attention_layernorm.weight": (s.d_model,),
        }
    for i in range(s.vision_layers):
        shapes |= _vision_layer(f"{vision}encoder.layers.{i}.", s)
    return shapes


def _vision_layer(layer: str, s: Sizes) -> dict[str, tuple[int, ...]]:
    w = s.vision_width
    linears = {
        "self_attn.q_proj": (w, w),
        "self_attn.k_proj": (w, w),
        "self_attn.v_proj": (w, w),
        "self_attn.out_proj": (w, w),
        "mlp.fc1": (s.vision_ff, w),
        "mlp.fc2": (w, s.vision_ff),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        shapes[f"{layer}{name}.weight"] = shape
        shapes[f"{layer}{name}.bias"] = shape[:1]
    for name in ("layer_norm1", "layer_norm2"):
        shapes[f"{layer}{name}.weight"] = shapes[f"{layer}{name}.bias"] = (w,)
    return shapes
