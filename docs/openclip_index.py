"""Writes encoder/openclip.json from open_clip's registry.

    python docs/openclip_index.py [--check]

--check writes nothing and ends with 1 where the file is not current.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import open_clip
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from encoder.encoder_config import TowerConfig
from encoder.openclip import INDEX, MEAN_STD
from encoder.tower import Tower

POOLING = "attn_pool."  # behind the tower, and no part of a VLM's
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}


def build_trunk(name: str, pool: str = "map", **sizes: int) -> torch.nn.Module:
    """The timm model as open_clip's TimmModel builds it."""
    return timm.create_model(name, num_classes=0, global_pool=pool, **sizes)


def config_of(trunk: Any) -> TowerConfig:
    block = trunk.blocks[0]
    return TowerConfig(
        width=trunk.embed_dim,
        num_layers=len(trunk.blocks),
        num_heads=block.attn.num_heads,
        intermediate=block.mlp.fc1.out_features,
        image_size=trunk.patch_embed.img_size[0],
        patch_size=trunk.patch_embed.patch_size[0],
        activation=ACTIVATIONS[type(block.mlp.act).__name__],
        norm_eps=trunk.norm.eps,
    )


def tower_sizes(name: str, pool: str) -> dict[str, Any] | None:
    """Sizes of a trunk whose parameters, its pooling's left out, are those of a Tower; None for any other."""
    with torch.device("meta"):
        trunk = build_trunk(name, pool)
        if type(trunk) is not VisionTransformer or type(trunk.blocks[0].mlp.act).__name__ not in ACTIVATIONS:
            return None
        config = config_of(trunk)
        ours = Tower(config)
    theirs = {key: value.shape for key, value in trunk.state_dict().items() if not key.startswith(POOLING)}
    if {key: value.shape for key, value in ours.state_dict().items()} != theirs:
        return None
    return dataclasses.asdict(config)


def tags_of(name: str) -> dict[str, str]:
    """Repositories of the hub by tag, of weights for pixels in -1 to 1."""
    tags = {}
    for tag in open_clip.list_pretrained_tags_by_model(name):
        weights = open_clip.get_pretrained_cfg(name, tag)
        if weights.get("hf_hub") and list(weights["mean"]) == list(weights["std"]) == MEAN_STD:
            tags[tag] = weights["hf_hub"].strip("/")
    return tags


def build() -> dict[str, Any]:
    trunks: dict[str, Any] = {}
    towers = {}
    defaults = {field.name: field.default for field in dataclasses.fields(TowerConfig)}
    for name in open_clip.list_models():
        vision = open_clip.get_model_config(name)["vision_cfg"]
        trunk = vision.get("timm_model_name")
        if not trunk or vision["timm_pool"] != "map" or not (tags := tags_of(name)):
            continue
        if trunk not in trunks:
            sizes = tower_sizes(trunk, vision["timm_pool"])
            trunks[trunk] = sizes and {key: v for key, v in sizes.items() if v != defaults[key]}
        if trunks[trunk]:
            towers[name] = {"trunk": trunk, "pretrained": tags}
    return {"trunks": {name: sizes for name, sizes in trunks.items() if sizes}, "towers": towers}


def main() -> int:
    text = json.dumps(build(), indent=1, sort_keys=True) + "\n"
    if "--check" in sys.argv[1:]:
        if INDEX.read_text(encoding="utf-8") != text:
            print(f"not current: {INDEX.name}; python docs/openclip_index.py writes it")
            return 1
        return 0
    INDEX.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
