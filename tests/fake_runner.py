"""A real engine and a real batcher on fakes: answers in milliseconds, no weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_backend import EOS, ByteTokens, FakeBackend

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from llm.engine import Engine
from llm.engine_config import EngineConfig
from workers.local.engine_runner import EngineRunner

TOKENS_PER_TILE = 5
ABOUT = {"encoder_revision": "revision", "dtype": "float32", "visual_width": 2}


def fake_runner(**options: Any) -> EngineRunner:
    """options: of `FakeBackend`."""

    def encode(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.zeros((TOKENS_PER_TILE * len(tiles), 2)) for tiles in images]

    def num_rows(tiles: np.ndarray) -> int:
        return TOKENS_PER_TILE * len(tiles)

    batcher = TileBatcher(encode, VisualCache(1 << 20), num_rows=num_rows, concat=np.concatenate)
    config = EngineConfig(step_stretch=None)
    return EngineRunner(
        batcher,
        lambda visuals: Engine(FakeBackend(**options), visuals, config, ByteTokens(), frozenset({EOS})),
        about=ABOUT,
    )
