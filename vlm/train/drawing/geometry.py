"""The sizes of a checkpoint that training needs."""

import json
from dataclasses import dataclass
from pathlib import Path

from vlm.train.drawing.tiles import PATCH, TILE


@dataclass(frozen=True)
class Shape:
    """The sizes a checkpoint's config.json fixes."""

    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_mlp: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    rope_theta: float
    fold: int  # pixel shuffle's side
    image_token: int

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        """From a Hugging Face directory."""
        config = json.loads((folder / "config.json").read_text())
        text, vision = config["text_config"], config["vision_config"]
        if (vision["image_size"], vision["patch_size"]) != (TILE, PATCH):
            raise ValueError(f"training needs tiles of {TILE} px and patches of {PATCH} px")
        return cls(
            vision["hidden_size"],
            vision["num_hidden_layers"],
            vision["num_attention_heads"],
            vision["intermediate_size"],
            text["hidden_size"],
            text["num_hidden_layers"],
            text["num_attention_heads"],
            text["num_key_value_heads"],
            text["head_dim"],
            text["intermediate_size"],
            text["vocab_size"],
            text["rope_parameters"]["rope_theta"],
            config["scale_factor"],
            config["image_token_id"],
        )
