"""The preprocess stage on a thread of this process: for commands whose images the user owns."""

from __future__ import annotations

import asyncio

from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec, preprocess
from preprocess.types import ImageInfo
from workers.contract.stages import Urgency
from workers.contract.tiles_handle import MadeTiles, TilesHandle


class InlinePreprocess:
    """`PreprocessStage` without isolation: a hostile image can hold or kill this process."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def tiles(
        self,
        data: bytes,
        info: ImageInfo,
        spec: PreprocessSpec,
        limits: ImageLimits,
        *,
        deadline_s: float,
        urgency: Urgency | None = None,
    ) -> TilesHandle:
        return MadeTiles(await asyncio.to_thread(preprocess, data, spec, limits))
