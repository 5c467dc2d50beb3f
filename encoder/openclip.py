"""The vision towers that open_clip names, as plain sizes: a gateway counts tokens without torch or timm.

`openclip.json` is written by docs/openclip_index.py from open_clip's own registry: the towers whose timm
models hold the parameters of a `Tower`, and the hub's repository of each pretrained tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from encoder.encoder_config import EncoderConfigError, TowerConfig

INDEX = Path(__file__).with_suffix(".json")
LOCAL_DIR, HF_HUB = "local-dir:", "hf-hub:"  # open_clip's own forms of a tower that its registry lacks
CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
MEAN_STD = [0.5, 0.5, 0.5]  # of every tower in the index, for both


@dataclass(frozen=True, slots=True)
class NamedTower:
    trunk: str  # timm's name of it
    pretrained: Mapping[str, str]  # repository of the hub by tag


@dataclass(frozen=True, slots=True)
class Index:
    trunks: dict[str, TowerConfig]  # by timm's name
    towers: dict[str, NamedTower]  # by open_clip's name


@cache
def index() -> Index:
    read = json.loads(INDEX.read_text(encoding="utf-8"))
    return Index(
        {name: TowerConfig(**sizes) for name, sizes in read["trunks"].items()},
        {name: NamedTower(**tower) for name, tower in read["towers"].items()},
    )


def open_clip_names() -> tuple[str, ...]:
    return tuple(sorted(index().towers))


def open_clip_tower(name: str) -> TowerConfig:
    """`name`: of the registry, or `local-dir:` and a folder with open_clip's own config file.

    Raises EncoderConfigError, which lists what is known, for any other."""
    if name.startswith(LOCAL_DIR):
        return _tower_in(Path(name.removeprefix(LOCAL_DIR)))
    return index().trunks[_named(name).trunk]


def open_clip_repo(name: str, tag: str) -> str:
    """ORG/NAME of a pretrained tag. Raises EncoderConfigError, which lists the tags."""
    tags = _named(name).pretrained
    if tag not in tags:
        known = ", ".join(sorted(tags)) or "none"
        raise EncoderConfigError(f"weights of {name} must be a file or one of open_clip's tags: {known}")
    return tags[tag]


def _named(name: str) -> NamedTower:
    if name not in index().towers:
        raise EncoderConfigError(f"open_clip tower must be one of {', '.join(open_clip_names())}")
    return index().towers[name]


def _tower_in(folder: Path) -> TowerConfig:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        vision, shown = config["model_cfg"]["vision_cfg"], config.get("preprocess_cfg", {})
        trunk, size = vision.get("timm_model_name"), vision.get("image_size")
        scaling = [list(shown.get(name, MEAN_STD)) for name in ("mean", "std")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise EncoderConfigError(f"the tower's {CONFIG_FILE} can't be read") from None
    tower = index().trunks.get(trunk) if isinstance(trunk, str) else None
    if tower is None:
        raise EncoderConfigError(f"open_clip trunk must be one of {', '.join(sorted(index().trunks))}")
    if size not in (None, tower.image_size, [tower.image_size] * 2):
        raise EncoderConfigError(f"open_clip tower: image_size must be that of {trunk}, {tower.image_size}")
    if scaling != [MEAN_STD, MEAN_STD]:
        raise EncoderConfigError("open_clip tower: mean and std must be 0.5 in each channel")
    return tower
