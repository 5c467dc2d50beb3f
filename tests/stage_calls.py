"""The preprocess stage asked as the pipeline asks it."""

from __future__ import annotations

import contextlib
from typing import Any

from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import PreprocessSpec
from preprocess.types import Tiles
from workers.contract.stages import MAX_ATTEMPTS, PreprocessStage, unreachable
from workers.contract.tiles_handle import TilesLost


async def tiles_of(
    stage: PreprocessStage, data: bytes, spec: PreprocessSpec, limits: ImageLimits, **options: Any
) -> Tiles:
    """Tiles by the file's header, opened here and given back."""
    for _ in range(MAX_ATTEMPTS):
        handle = await stage.tiles(data, probe(data, limits), spec, limits, **options)
        with contextlib.closing(handle), contextlib.suppress(TilesLost):
            return handle.open()
    raise unreachable()
