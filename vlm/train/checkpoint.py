"""Training state in one safetensors file: tensors as such, everything else as JSON in its header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

STATE = "state"


def save_state(path: Path, state: Any) -> None:
    """Writes nested dicts and lists of tensors and JSON values; a crash leaves the old or the new file."""
    tensors: dict[str, torch.Tensor] = {}
    described = json.dumps(_pack(state, "", tensors))
    unfinished = path.with_name(f"{path.name}.tmp")
    save_file(tensors, unfinished, metadata={STATE: described})
    os.replace(unfinished, path)


def load_state(path: Path) -> Any:
    """What `save_state` wrote. Raises ValueError for a file that isn't one of its."""
    with safe_open(path, framework="pt") as file:
        described = (file.metadata() or {}).get(STATE)
        if described is None:
            raise ValueError("not a training checkpoint of this version")
        return _unpack(json.loads(described), file.get_tensor)


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().clone().contiguous()  # tied tensors get a copy each
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_pack(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]}
    return {"value": value}


def _unpack(packed: dict[str, Any], tensor: Any) -> Any:
    ((kind, content),) = packed.items()
    match kind:
        case "tensor":
            return tensor(content)
        case "dict":
            return {key: _unpack(item, tensor) for key, item in content}
        case "list":
            return [_unpack(item, tensor) for item in content]
        case _:
            return content
