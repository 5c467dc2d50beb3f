"""Writes trained weights as a Hugging Face directory of the SmolVLM family."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlm.train.drawing.tiles import LONGEST_EDGE
from vlm.train.network import Network

COPIED = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def export(network: Network, template: Path, folder: Path) -> None:
    """bfloat16 weights, with configuration and tokenizer from `template`, a directory of the same family.

    The processor's longest edge becomes the one training used. Raises OSError where a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if template.resolve() != folder.resolve():
            shutil.copyfile(template / name, folder / name)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in network.exported().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((template / "config.json").read_text())
    config["dtype"] = "bfloat16"
    _write(folder / "config.json", config)
    processor = json.loads((template / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part]["size"] = {"longest_edge": LONGEST_EDGE}
    processor["video_processor"]["video_sampling"]["video_size"] = {"longest_edge": LONGEST_EDGE}
    _write(folder / "processor_config.json", processor)
    _write(folder / "generation_config.json", json.loads((template / "generation_config.json").read_text()))


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
