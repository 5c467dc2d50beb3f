"""Where a model's parts come from: what follows `--model`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from encoder.encoder_config import ConnectorConfig, EncoderConfig
from encoder.openclip import open_clip_tower
from llm.text_config import ConfigError
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.hub import Files, Hub, cached_repo, parse_hub_id

OPEN_CLIP_PREFIX = "open_clip:"
OPEN_CLIP_POOLING_SIDE = 2  # 4:1, as in the articles
OPEN_CLIP_SEED = 0
FORMS = (
    "a checkpoint directory, ORG/NAME or ORG/NAME@REVISION of the hub, 'default', or "
    "open_clip:TOWER:DECODER, where DECODER is a directory or a hub id"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint directory, or an open_clip tower beside a decoder's.

    `open_clip:NAME:DECODER` is the articles' form: tower NAME, average pooling 2x2, any GQA decoder with a
    chat template. Weights of tower and connector are read from `open_clip.safetensors` and
    `connector.safetensors` in the decoder's directory; what has no file is drawn from a fixed seed.
    """

    directory: Path
    tower: str = ""

    @classmethod
    def parse(cls, model: str | Path, files: Files = "all") -> ModelSource:
        """`files`: how much of a hub's checkpoint has to be here. Raises ConfigError with the accepted forms
        for what is none of them, and HubError for an id that can't be had."""
        tower, path = "", str(model)
        if path.startswith(OPEN_CLIP_PREFIX):
            tower, _, path = path[len(OPEN_CLIP_PREFIX) :].partition(":")
        directory = Path(DEFAULT_MODEL if path == "default" else path)
        if directory.is_dir():
            return cls(directory, tower)
        hub_id = parse_hub_id(path)
        if hub_id is None or path.startswith((".", "/")):
            raise ConfigError(f"no folder is at {path or model}; accepted: {FORMS}")
        return cls(Hub(say=_say).fetch(hub_id, files), tower)

    @property
    def name(self) -> str:
        """As clients see it."""
        if not self.tower and self.directory.samefile(DEFAULT_MODEL):
            return "vlm-default"
        return "+".join(
            filter(None, (self.tower, cached_repo(self.directory) or self.directory.resolve().name))
        )

    def __str__(self) -> str:
        """The same parts to `parse`, without a word to a hub."""
        return f"{OPEN_CLIP_PREFIX}{self.tower}:{self.directory}" if self.tower else str(self.directory)

    @property
    def tower_file(self) -> Path | None:
        return _existing(self.directory / "open_clip.safetensors")

    @property
    def connector_file(self) -> Path | None:
        return _existing(self.directory / "connector.safetensors")

    def open_clip_config(self, d_model: int) -> EncoderConfig:
        """Raises EncoderConfigError, with the known names, for an unknown tower."""
        connector = ConnectorConfig("average_pool", OPEN_CLIP_POOLING_SIDE, d_model)
        return EncoderConfig(open_clip_tower(self.tower), connector)


def pinned(options: EngineOptions) -> EngineOptions:
    """The options with a model that is here: every process reads the same commit, and none asks a hub."""
    return replace(options, model=str(ModelSource.parse(options.model)))


@contextlib.contextmanager
def naming(directory: Path) -> Iterator[None]:
    """Raises ConfigError with the directory for what is wrong with a checkpoint."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{directory}: {error}") from error


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _say(line: str) -> None:
    print(f"vlm: {line}", file=sys.stderr, flush=True)
