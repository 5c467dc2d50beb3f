"""The preprocess stage as the pipeline sees it; its twins are `InlinePreprocess`, `LocalPreprocess` and
`CeleryPreprocess`, each in a file of its own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from llm.request import Priority
from preprocess.limits import ImageLimits
from preprocess.stage import PreprocessSpec
from preprocess.types import ImageError, ImageInfo
from workers.contract.tiles_handle import TilesHandle

MAX_ATTEMPTS = 3


class StageUnavailable(Exception):
    """The service could not do the work in time; the image may be fine. `message` is safe for clients."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Urgency:
    """Of an image: batch work may become interactive while it waits, when such a request joins it."""

    def __init__(self, priority: Priority = "interactive") -> None:
        self._priority: Priority = priority
        self.on_change: Callable[[], None] | None = None  # of whoever it waits with

    @property
    def priority(self) -> Priority:
        return self._priority

    @priority.setter
    def priority(self, priority: Priority) -> None:
        is_new, self._priority = priority != self._priority, priority
        if is_new and self.on_change is not None:
            self.on_change()


@runtime_checkable
class Queued(Protocol):
    """A stage whose work waits in a queue that an autoscaler may look at."""

    async def queues(self) -> dict[str, dict[str, float]]:
        """Figures by queue."""
        ...


class PreprocessStage(Protocol):
    """Tiles of images, decoded somewhere off the serving path."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

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
        """The tiles of an image of which `info` tells; the caller closes them.

        Raises ImageError for an image that will never do, StageUnavailable for one that may do later.

        An image whose decoder dies or hangs is tried MAX_ATTEMPTS times in all. Interactive images, the
        default, are decoded before those of batch work.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Of one attempt at one image."""

    memory_bytes: int = 2 << 30  # beyond what the idle process has
    cpu_s: int = 8

    def cpu_within(self, deadline_s: float) -> int:
        """Processor time that leaves room for every attempt before the deadline."""
        return max(1, min(self.cpu_s, int(deadline_s / (MAX_ATTEMPTS + 1))))


def processing_failed() -> ImageError:
    return ImageError(
        "image_processing_failed", "The image could not be processed: decoding it failed repeatedly."
    )


def deadline_passed() -> StageUnavailable:
    return StageUnavailable("preprocessing_timeout", "The image was not processed in time. Please try again.")


def overloaded() -> StageUnavailable:
    return StageUnavailable(
        "preprocessing_overloaded", "Too many images are waiting. Please try again later."
    )


def unreachable() -> StageUnavailable:
    return StageUnavailable(
        "preprocessing_unavailable", "Image processing is unavailable. Please try again later."
    )
