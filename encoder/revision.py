"""The encoder's revision: what visual tokens depend on besides the tiles. Torch-free.

It is part of every visual-token key, so gateways and CPU workers must be able to compute it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from encoder.encoder_config import Arithmetic, EncoderConfig
from encoder.openclip import LOCAL_DIR
from encoder.tensor_files import TensorEntry, read_header, read_index
from encoder.tensor_names import VisualNames

OPEN_CLIP_POOLING = "visual.trunk.attn_pool."  # open_clip pools the tower's output with it; a VLM doesn't
CHUNK_BYTES = 1 << 20


def encoder_revision(directory: Path, config: EncoderConfig, names: VisualNames) -> str:
    """64 hex digits over the vision and connector weights and the settings that shape their output."""
    entries = {name: entry for name, entry in read_index(directory).items() if names.is_visual(name)}
    return revision_of(config, entries)


def revision_of(config: EncoderConfig, entries: dict[str, TensorEntry], *extra: str) -> str:
    """Hash of a configuration, of tensors by name, and of further strings (a seed, a model name)."""
    digest = hashlib.sha256()

    def add(field: bytes) -> None:
        digest.update(len(field).to_bytes(8, "little") + field)

    add(json.dumps(_settings(config), sort_keys=True).encode())
    for text in extra:
        add(text.encode())
    for name, entry in sorted(entries.items()):
        add(name.encode())
        add(f"{entry.dtype}{list(entry.shape)}".encode())
        digest.update((entry.end - entry.start).to_bytes(8, "little"))
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            left = entry.end - entry.start
            while left:
                chunk = file.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise ValueError("a weight file was cut short while it was read")
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def with_arithmetic(revision: str, arithmetic: Arithmetic) -> str:
    """Of an encoder that multiplies in another type than its own: its tokens are others."""
    if arithmetic == "float32":
        return revision
    return hashlib.sha256(f"{revision} multiplied in {arithmetic}".encode()).hexdigest()


def _settings(config: Any) -> dict[str, Any]:
    """Fields of a dataclass and of those in it, but for those that are as declared: what an option adds
    changes no revision where it isn't used."""
    given = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _settings(value)
        if value != field.default:
            given[field.name] = value
    return given


def open_clip_trunk(file: Path) -> dict[str, TensorEntry]:
    """The vision tensors of open_clip's own safetensors file, without its pooling head."""
    return {
        name: entry
        for name, entry in read_header(file).items()
        if name.startswith("visual.") and not name.startswith(OPEN_CLIP_POOLING)
    }


def open_clip_revision(
    config: EncoderConfig, name: str, pretrained: Path | None, connector_weights: Path | None, seed: int
) -> str:
    """As `encoder_revision`, for an open_clip tower: what has no file comes from the seed."""
    trunk = open_clip_trunk(pretrained) if pretrained is not None else {}
    joined = read_header(connector_weights) if connector_weights is not None else {}
    name = LOCAL_DIR if name.startswith(LOCAL_DIR) else name  # one key on all machines
    return revision_of(config, trunk | joined, "open_clip", name, str(seed))
