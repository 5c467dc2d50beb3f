"""Where a model's parts come from: what follows `--model`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError
from encoder.openclip import CONFIG_FILE, HF_HUB, LOCAL_DIR, WEIGHTS_FILE, open_clip_repo, open_clip_tower
from llm.text_config import ConfigError
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.hub import Files, Hub, HubId, cached_repo, parse_hub_id

OPEN_CLIP_PREFIX = "open_clip:"
OPEN_CLIP_POOLING_SIDE = 2  # 4:1, as in the articles
OPEN_CLIP_SEED = 0
FORMS = (
    "a checkpoint directory, ORG/NAME or ORG/NAME@REVISION of the hub, 'default', or "
    "open_clip:TOWER[@PRETRAINED]:DECODER, where DECODER is a directory or a hub id"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint directory, or an open_clip tower beside a decoder's.

    `open_clip:TOWER[@PRETRAINED]:DECODER` is the articles' form: average pooling 2x2, any GQA decoder with a
    chat template. TOWER is of open_clip's registry, and PRETRAINED one of its tags or a safetensors file; or
    TOWER is `hf-hub:ORG/NAME[@REVISION]` or `local-dir:FOLDER`, with open_clip's own two files. Weights of
    tower and connector are otherwise read from `open_clip.safetensors` and `connector.safetensors` in the
    decoder's directory; what has no file is drawn from a fixed seed.
    """

    directory: Path
    tower: str = ""
    pretrained: str = ""  # of a tower of the registry: a file, or a tag whose weights need not be here

    @classmethod
    def parse(cls, model: str | Path, files: Files = "all") -> ModelSource:
        """`files`: how much of a hub's checkpoint has to be here. Raises ConfigError with the accepted forms
        for what is none of them, and HubError for an id that can't be had."""
        tower, pretrained, path = "", "", str(model)
        if path.startswith(OPEN_CLIP_PREFIX):
            tower, pretrained, path = _split(path.removeprefix(OPEN_CLIP_PREFIX))
            tower, pretrained = _fetch_tower(tower, pretrained, files)
        directory = Path(DEFAULT_MODEL if path == "default" else path)
        if directory.is_dir():
            return cls(directory, tower, pretrained)
        hub_id = parse_hub_id(path)
        if hub_id is None or path.startswith((".", "/")):
            raise ConfigError(f"no folder is at {path or model}; accepted: {FORMS}")
        return cls(Hub(say=_say).fetch(hub_id, files), tower, pretrained)

    @property
    def name(self) -> str:
        """As clients see it."""
        if not self.tower and self.directory.samefile(DEFAULT_MODEL):
            return "vlm-default"
        tower = self.tower
        if tower.startswith(LOCAL_DIR):
            tower = _folder_name(Path(tower.removeprefix(LOCAL_DIR)))
        return "+".join(filter(None, (tower, _folder_name(self.directory))))

    def __str__(self) -> str:
        """The same parts to `parse`, without a word to a hub."""
        if not self.tower:
            return str(self.directory)
        tag = f"@{self.pretrained}" if self.pretrained else ""
        return f"{OPEN_CLIP_PREFIX}{self.tower}{tag}:{self.directory}"

    @property
    def tower_file(self) -> Path | None:
        if self.pretrained:
            return Path(self.pretrained)
        if self.tower.startswith(LOCAL_DIR):
            return Path(self.tower.removeprefix(LOCAL_DIR)) / WEIGHTS_FILE
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


def _split(text: str) -> tuple[str, str, str]:
    """(tower, pretrained, decoder)."""
    scheme = next((form for form in (HF_HUB, LOCAL_DIR) if text.startswith(form)), "")
    tower, _, decoder = text.removeprefix(scheme).partition(":")
    if scheme:
        return scheme + tower, "", decoder
    name, _, pretrained = tower.partition("@")
    return name, pretrained, decoder


def _fetch_tower(tower: str, pretrained: str, files: Files) -> tuple[str, str]:
    """Tower and pretrained as files here, as far as `files` asks for them. Raises ConfigError."""
    weights = (WEIGHTS_FILE,) if files == "all" else ()
    if tower.startswith(HF_HUB):
        hub_id = parse_hub_id(tower.removeprefix(HF_HUB))
        if hub_id is None:
            raise ConfigError(f"{tower} must be hf-hub:ORG/NAME or hf-hub:ORG/NAME@REVISION")
        return f"{LOCAL_DIR}{Hub(say=_say).fetch_files(hub_id, (CONFIG_FILE, *weights))}", ""
    if pretrained and not Path(pretrained).is_file():
        try:
            repo = HubId(open_clip_repo(tower, pretrained))
        except EncoderConfigError as error:
            raise ConfigError(str(error)) from None
        if weights:
            pretrained = str(Hub(say=_say).fetch_files(repo, weights) / WEIGHTS_FILE)
    return tower, pretrained


def _folder_name(directory: Path) -> str:
    return cached_repo(directory) or directory.resolve().name


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _say(line: str) -> None:
    print(f"vlm: {line}", file=sys.stderr, flush=True)
