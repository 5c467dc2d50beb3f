"""What the serving side knows of a model without its weights: prompts, tiling, costs. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from encoder.encoder_config import ConnectorConfig, EncoderConfig
from encoder.geometry import VisionGeometry
from encoder.openclip import open_clip_tower
from encoder.revision import open_clip_revision
from llm.cost import DecoderShape, kv_bytes, kv_element_bytes
from llm.decoder_config import ConfigError, DecoderConfig
from llm.request import VisualKey
from llm.storage import KvStorage
from llm.text.tokenizer import Tokenizer
from preprocess.stage import PreprocessSpec, tiles_key
from preprocess.tiling import AspectGridTiling
from preprocess.types import Detail, TileGrid, Variant
from vlm.checkpoint import Checkpoint
from vlm.config import DEFAULT_MODEL
from vlm.families.articles import PlainFormat
from vlm.families.base import Family
from vlm.prompt import ImageFormat, PromptBuilder

_KEY_VERSION = "visual-1"
BLOCK_SIZE = 16  # positions of a KV block
OPEN_CLIP_PREFIX = "open_clip:"
OPEN_CLIP_POOLING_SIDE = 2  # 4:1, as in the articles
OPEN_CLIP_SEED = 0
OPEN_CLIP_IMAGE_ID = 0  # any id: visual tokens take its place


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's parts come from: a checkpoint directory, or an open_clip tower beside a decoder's.

    `open_clip:NAME:DIRECTORY` is the articles' form: tower NAME, average pooling 2x2, any GQA decoder with
    a chat template in DIRECTORY. Weights of tower and connector are read from `open_clip.safetensors` and
    `connector.safetensors` in DIRECTORY; what has no file is drawn from a fixed seed.
    """

    directory: Path
    tower: str = ""

    @classmethod
    def parse(cls, model: str | Path) -> ModelSource:
        """Raises ConfigError for what isn't a folder, with the accepted forms."""
        tower, path = "", str(model)
        if path.startswith(OPEN_CLIP_PREFIX):
            tower, _, path = path[len(OPEN_CLIP_PREFIX) :].partition(":")
        directory = Path(DEFAULT_MODEL if path == "default" else path)
        if not directory.is_dir():
            raise ConfigError(
                f"{model} is not a folder; give a Hugging Face checkpoint directory of the SmolVLM or "
                "Idefics3 family, 'default', or open_clip:TOWER:DECODER_DIRECTORY"
            )
        return cls(directory, tower)

    @property
    def name(self) -> str:
        """As clients see it."""
        if not self.tower and self.directory.samefile(DEFAULT_MODEL):
            return "vlm-default"
        return "+".join(filter(None, (self.tower, self.directory.resolve().name)))

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


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


@dataclass(frozen=True)
class ModelSpec:
    name: str  # as clients see it
    source: ModelSource
    family: Family | None  # None: the articles' form, a tower of open_clip's beside a plain decoder
    decoder: DecoderConfig
    shape: DecoderShape
    geometry: VisionGeometry
    tokenizer: Tokenizer
    preprocess: PreprocessSpec
    revision: str  # of the encoder, 64 hex digits
    kv: KvStorage = "float32"  # how the engine stores its cache
    _specs: dict[Detail, PreprocessSpec] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, model: str | Path, *, variant: Variant = "fast", kv: KvStorage = "float32") -> ModelSpec:
        """Reads a checkpoint directory's JSON files and hashes its vision weights.

        Raises ConfigError (or the package's own ValueError) where it isn't a checkpoint of a known family.
        """
        source = ModelSource.parse(model)
        checkpoint = Checkpoint.read(source.directory)
        decoder = checkpoint.decoder
        if source.tower:
            family = None
            encoder = source.open_clip_config(decoder.d_model)
            preprocess = PreprocessSpec(AspectGridTiling(encoder.tower.image_size), variant=variant)
            revision = open_clip_revision(
                encoder, source.tower, source.tower_file, source.connector_file, OPEN_CLIP_SEED
            )
        else:
            family, encoder = checkpoint.family, checkpoint.encoder
            preprocess, revision = checkpoint.preprocess(variant), checkpoint.revision
        return cls(
            name=source.name,
            source=source,
            family=family,
            decoder=decoder,
            shape=checkpoint.shape,
            geometry=encoder.geometry,
            tokenizer=Tokenizer.from_directory(source.directory),
            preprocess=preprocess,
            revision=revision,
            kv=kv,
        )

    @property
    def directory(self) -> Path:
        return self.source.directory

    @property
    def context_length(self) -> int:
        return self.decoder.max_positions

    def preprocess_spec(self, detail: Detail) -> PreprocessSpec:
        if detail not in self._specs:
            base = self.preprocess
            self._specs[detail] = PreprocessSpec(
                base.rule, detail, base.variant, base.background, base.resample
            )
        return self._specs[detail]

    def visual_key(self, digest: str, spec: PreprocessSpec, namespace: str = "") -> VisualKey:
        """Names visual tokens by the image's bytes, how they are tiled and what encodes them; a namespace
        has its own, so that no caller can time whether another one sent the image."""
        fields = (_KEY_VERSION, tiles_key(digest, spec), self.revision, *filter(None, (namespace,)))
        encoded = b"".join(len(f).to_bytes(8, "big") + f.encode() for f in fields)
        return VisualKey(hashlib.sha256(encoded).hexdigest())

    @cached_property
    def image_format(self) -> ImageFormat:
        if self.family is None:
            return PlainFormat(OPEN_CLIP_IMAGE_ID, self.geometry.tokens_per_tile)
        return self.family.image_format(self.tokenizer, self.geometry)

    @cached_property
    def prompt_builder(self) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.image_format, flat=bool(self.source.tower))

    def image_prompt_tokens(self, grid: TileGrid) -> int:
        """Prompt tokens that one more image of this grid adds, markers included."""
        return self.prompt_builder.image_tokens(grid)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV cache of a sequence of this length, whole blocks, as the engine stores it."""
        element_bytes = kv_element_bytes(self.kv, self.shape.head_dim)
        return int(kv_bytes(self.shape, num_tokens, element_bytes, block_size=BLOCK_SIZE))
