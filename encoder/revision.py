"""The encoder's revision: what visual tokens depend on besides the tiles. Torch-free.

It is part of every visual-token key, so gateways and CPU workers must be able to compute it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from encoder.checkpoint import TensorEntry, read_index
from encoder.config import EncoderConfig

VISUAL_PREFIXES = ("model.vision_model.", "model.connector.")
TEXT_PREFIXES = ("model.text_model.", "lm_head.")
CHUNK_BYTES = 1 << 20


def encoder_revision(directory: Path) -> str:
    """64 hex digits over the vision and connector weights and the settings that shape their output."""
    entries = {name: entry for name, entry in read_index(directory).items() if is_visual(name)}
    return revision_of(EncoderConfig.from_directory(directory), entries)


def is_visual(name: str) -> bool:
    """Whatever isn't the decoder's belongs to the encoder, so that no name falls between the two."""
    return not name.startswith(TEXT_PREFIXES)


def revision_of(config: EncoderConfig, entries: dict[str, TensorEntry], *extra: str) -> str:
    """Hash of a configuration, of tensors by name, and of further strings (a seed, a model name)."""
    digest = hashlib.sha256()

    def add(field: bytes) -> None:
        digest.update(len(field).to_bytes(8, "little") + field)

    add(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
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
