"""Where a Hugging Face directory keeps each tensor: safetensors headers, read without torch.

Source of the format: github.com/huggingface/safetensors, "Format" in its README: 8 bytes little-endian
header length, a JSON header of {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that can't be read as it stands; the message names the tensors, never a path."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    file: Path
    dtype: str  # as in the header: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


def read_index(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a single or sharded checkpoint, by name."""
    if (directory / SINGLE_NAME).is_file():
        return read_header(directory / SINGLE_NAME)
    try:
        weight_map: dict[str, str] = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    except FileNotFoundError as error:
        raise CheckpointError("the checkpoint has no safetensors weights") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("the checkpoint's weight index can't be read") from error
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:  # an index must not lead out of its directory
            raise CheckpointError("the checkpoint's weight index names a file outside its directory")
        entries |= read_header(directory / name)
    lost = sorted(weight_map.keys() - entries.keys())
    if lost:
        raise CheckpointError(f"the checkpoint's files lack {_some(lost)}")
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; raises CheckpointError if it is damaged or cut short."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if length > min(MAX_HEADER_BYTES, total - 8):
                raise CheckpointError(f"{path.name} is not a whole safetensors file")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"the checkpoint's {path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not a whole safetensors file") from error
    header.pop("__metadata__", None)
    data = 8 + length
    entries = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= total - data:
            raise CheckpointError(f"{path.name} is not a whole safetensors file")
        entries[name] = TensorEntry(path, entry["dtype"], tuple(entry["shape"]), data + start, data + end)
    return entries


def check_names(expected: dict[str, tuple[int, ...]], found: dict[str, TensorEntry]) -> None:
    """Raises CheckpointError unless `found` has exactly the expected names, each in its expected shape."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(f"the checkpoint has unexpected weights: {_some(unexpected)}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(f"{name} has shape {list(found[name].shape)}, expected {list(shape)}")


_MOST_NAMES = 3


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
