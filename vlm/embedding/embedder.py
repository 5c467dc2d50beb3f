"""An open_clip SigLIP model: pixels and texts to unit vectors of one space.

The model is built from a configuration and read from safetensors; nothing of a checkpoint is run as code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from encoder.openclip import CONFIG_FILE, HF_HUB, LOCAL_DIR, WEIGHTS_FILE, EncoderConfigError, open_clip_repo
from llm.text_config import ConfigError
from preprocess.stage import PreprocessSpec
from preprocess.tiling import SquashTiling
from vlm.hub import Hub, HubId, parse_hub_id

PREFIX = "open_clip:"
ACCEPTED = (
    "an embedder is open_clip:NAME@PRETRAINED, with a tag of open_clip's or a safetensors file, "
    "open_clip:hf-hub:ORG/NAME or open_clip:local-dir:FOLDER"
)
BATCH = 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbedderSource:
    """`model`: a name of open_clip's registry, or local-dir: and a folder, which then has the weights too."""

    name: str
    model: str
    weights: Path

    @classmethod
    def parse(cls, text: str) -> EmbedderSource:
        """Downloads what a hub has. Raises ConfigError and HubError."""
        given = text.removeprefix(PREFIX)
        if given == text or not given:
            raise ConfigError(ACCEPTED)
        if given.startswith(LOCAL_DIR):
            return cls._of_folder(text, Path(given.removeprefix(LOCAL_DIR)))
        name, _, pretrained = given.partition("@")
        if given.startswith(HF_HUB):
            hub_id = parse_hub_id(given.removeprefix(HF_HUB))
            if hub_id is None:
                raise ConfigError(ACCEPTED)
        elif not pretrained:
            raise ConfigError(ACCEPTED)
        elif Path(pretrained).is_file():
            return cls(text, name, Path(pretrained))
        else:
            try:
                hub_id = HubId(open_clip_repo(name, pretrained))
            except EncoderConfigError as error:
                raise ConfigError(str(error)) from None
        files = (CONFIG_FILE, WEIGHTS_FILE, *_TOKENIZER_FILES)
        return cls._of_folder(text, Hub().fetch_files(hub_id, files))

    @classmethod
    def _of_folder(cls, text: str, folder: Path) -> EmbedderSource:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder}: an embedder's folder has {CONFIG_FILE} and {WEIGHTS_FILE}")
        return cls(text, f"{LOCAL_DIR}{folder}", folder / WEIGHTS_FILE)


class Embedder:
    """Works in a thread of its own, one batch after another. Used from one event loop."""

    def __init__(self, source: EmbedderSource) -> None:
        """Builds the model and reads its weights. Raises ConfigError."""
        import open_clip
        import torch
        from safetensors.torch import load_file

        self.name = source.name
        torch.set_num_threads(1)
        with _explained(source):
            self._model = open_clip.create_model(source.model, load_weights=False).eval()
            self._model.load_state_dict(load_file(source.weights))
            self._tokenizer = open_clip.get_tokenizer(source.model)
            settings = _preprocessing(self._model, source)
            self._mean, self._std = (np.asarray(settings[key], np.float32) for key in ("mean", "std"))
            side = int(self._model.visual.image_size[0])
        if settings["resize_mode"] != "squash":
            raise ConfigError(f"{source.name}: only SigLIP models are embedders, which take an image whole")
        # as the model's own transform resizes, in the processes that decode for chats
        self.preprocess = PreprocessSpec(
            SquashTiling(side), "auto", "exact", resample=int(Image.Resampling.BICUBIC)
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embed")

    async def texts(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """(float32 [len(texts), size], tokens read). A text beyond the model's context is cut off there."""

        def embed(batch: Sequence[str]) -> tuple[np.ndarray, int]:
            ids = self._tokenizer(list(batch))
            vectors = self._model.encode_text(ids, normalize=True)
            return vectors.float().numpy(), sum(map(_length, ids.tolist()))

        found = [await self._run(embed, batch) for batch in _batches(texts)]
        return np.concatenate([vectors for vectors, _ in found]), sum(count for _, count in found)

    async def images(self, pixels: Sequence[np.ndarray]) -> np.ndarray:
        """`pixels`: uint8 [side, side, 3] of each image. Float32 [len(pixels), size]."""

        def embed(batch: Sequence[np.ndarray]) -> np.ndarray:
            import torch

            scaled = (np.stack(batch).astype(np.float32) / 255 - self._mean) / self._std
            images = torch.from_numpy(scaled).permute(0, 3, 1, 2).contiguous()
            vectors: np.ndarray = self._model.encode_image(images, normalize=True).float().numpy()
            return vectors

        return np.concatenate([await self._run(embed, batch) for batch in _batches(pixels)])

    async def _run(self, embed: Callable[[Any], T], batch: Sequence[Any]) -> T:
        import torch

        def work() -> T:
            with torch.inference_mode():
                return embed(batch)

        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


def _preprocessing(model: Any, source: EmbedderSource) -> dict[str, Any]:
    """The model's own, which a folder's configuration may name."""
    from open_clip.transform import PreprocessCfg

    chosen = {
        "mean": PreprocessCfg.mean,
        "std": PreprocessCfg.std,
        "resize_mode": "shortest",
        **(getattr(model.visual, "preprocess_cfg", None) or {}),
    }
    if source.model.startswith(LOCAL_DIR):
        given = json.loads((source.weights.parent / CONFIG_FILE).read_text()).get("preprocess_cfg")
        chosen |= given if isinstance(given, dict) else {}
    elif "SigLIP" in source.model:  # whose tags all have these
        chosen |= {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resize_mode": "squash"}
    return chosen


@contextlib.contextmanager
def _explained(source: EmbedderSource) -> Iterator[None]:
    """Raises ConfigError for a model that can't be built or read."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever open_clip, timm and the readers of files raise
        raise ConfigError(f"{source.name} can't be loaded: {' '.join(str(error).split())[:300]}") from error


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _length(ids: list[int]) -> int:
    """Without the padding behind."""
    end = len(ids)
    while end > 1 and ids[end - 1] == ids[end - 2]:
        end -= 1
    return end
