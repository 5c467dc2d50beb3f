"""A tiny checkpoint of the default model's family, for the tests of training."""

import json
import shutil
from pathlib import Path

import torch

import vlm
from vlm.train.drawing.geometry import Shape
from vlm.train.network import Network

MODEL = Path(vlm.__file__).parent / "model"


def tiny_template(folder: Path) -> Path:
    """The shipped model's configuration and tokenizer, its sizes cut down; no weights."""
    folder.mkdir()
    for path in MODEL.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((MODEL / "config.json").read_text())
    config["vision_config"].update(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    config["text_config"].update(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config["text_config"]["head_dim"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_network(template: Path, seed: int = 0) -> Network:
    """Random weights of the template's sizes."""
    torch.manual_seed(seed)
    return Network(Shape.read(template))
