"""Tiles of all waiting images in ragged batches: plan, encode, commit. Pure bookkeeping around one callable.

Rules
- Single flight: one job per key, others who ask wait for it; what is cached or waiting isn't queued.
- A batch has at most `max_tiles` tiles of any number of images of one priority class, without padding, and
  fewer where these would take over `max_step_s` at the rate of late, which is measured in `work`: tiles may
  have any size, one for each image. An image with more is spread over steps, and after each batch that it
  fills alone the others go first.
- Interactive before batch, and not in one batch: an interactive image never waits for tiles that joined it.
  Batch-class tiles come `max_batch_tiles` at a time, so that it doesn't wait long for those under way either.
  Once a batch-class image has waited `ageing_s`, its class gets every second step; so interactive work takes
  at most twice its own steps and one, and batch work is never starved.
- A job that no request holds in the cache any more is dropped before its next tile.
- If an encode fails, its slices are tried one by one, and only the keys that fail alone are failures.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from encoder.cache import Failure, VisualCache
from encoder.geometry import Grid
from encoder.tile_budget import TileBudget

Priority = Literal["interactive", "batch"]

ENCODE_FAILED: Failure = ("encode_failed", "The image could not be encoded.")
WRONG_COUNT: Failure = (
    "visual_tokens_mismatch",
    "The encoder gave another number of visual tokens than planned.",
)

log = logging.getLogger(__name__)


class TokenPacker(Protocol):
    """Makes an image's visual tokens of the rows of all its tiles."""

    def rows_of_image(self, grid: Grid) -> int: ...

    def pack(self, rows: Any, grid: Grid) -> Any: ...


@dataclass(slots=True)
class _Job:
    key: str
    tiles: np.ndarray  # uint8 [n, H, W, 3]
    since: float  # seconds on the batcher's clock
    priority: Priority
    grid: Grid | None = None
    planned: int = 0  # tiles already in a batch
    encoded: int = 0  # tiles whose rows are here
    parts: dict[int, Any] = field(default_factory=dict)  # rows by first tile

    @property
    def left(self) -> int:
        return len(self.tiles) - self.planned


@dataclass(frozen=True, slots=True)
class TileSlice:
    """Tiles [start, stop) of one image."""

    key: str
    start: int
    stop: int
    tiles: np.ndarray


@dataclass(frozen=True, slots=True)
class TileBatch:
    slices: tuple[TileSlice, ...]
    work: float

    @property
    def num_tiles(self) -> int:
        return sum(part.stop - part.start for part in self.slices)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Keys that are in the cache now, and those that never will be."""

    finished: tuple[str, ...] = ()
    failures: tuple[tuple[str, Failure], ...] = ()
    num_tiles: int = 0


@dataclass(slots=True)
class BatcherCounters:
    steps: int = 0
    tiles: int = 0  # tiles in batches, each once
    encode_calls: int = 0
    joined: int = 0  # asked for while already waiting: single flight
    dropped: int = 0  # cancelled before they were complete


class TileBatcher:
    """Feeds `encode` and fills the cache. Not thread-safe: one owner.

    `encode` takes uint8 [n_i, H_i, W_i, 3] per slice and gives [num_rows, d_model] per slice; `num_rows` and
    `work` say of a slice's tiles how many rows they give and what they cost, in any unit: FLOPs, or tiles.
    `concat` joins the rows of an image that was spread over steps; `packer` packs them then. `step` is plan,
    encode, commit; only `encode` may run in another thread.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[np.ndarray]], Sequence[Any]],
        cache: VisualCache,
        *,
        num_rows: Callable[[np.ndarray], int],
        work: Callable[[np.ndarray], float] = len,
        max_tiles: int = 16,
        max_batch_tiles: int | None = None,
        max_step_s: float | None = None,
        max_wait_s: float = 0.0,
        ageing_s: float = 5.0,
        packer: TokenPacker | None = None,
        concat: Callable[[Sequence[Any]], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        max_batch_tiles = max_tiles if max_batch_tiles is None else min(max_tiles, max_batch_tiles)
        if max_tiles < 1 or max_batch_tiles < 1:
            raise ValueError("max_tiles and max_batch_tiles must be at least 1")
        if max_wait_s < 0 or ageing_s < 0:
            raise ValueError("max_wait_s and ageing_s must not be negative")
        self.cache = cache
        self.max_tiles = max_tiles
        self.max_batch_tiles = max_batch_tiles
        self.max_step_s = max_step_s
        self.max_wait_s = max_wait_s
        self.ageing_s = ageing_s
        self.counters = BatcherCounters()
        self._budget = TileBudget(max_step_s)
        self._encode = encode
        self._packer = packer
        self._concat = concat or _torch_concat
        self._clock = clock
        self._num_rows = num_rows
        self._work = work
        self._jobs: dict[str, _Job] = {}  # waiting or partly encoded
        self._queues: dict[Priority, deque[_Job]] = {"interactive": deque(), "batch": deque()}
        self._turn: Priority = "batch"  # the class of the latest batch

    def put_tiles(
        self,
        key: str,
        tiles: np.ndarray,
        priority: Priority = "interactive",
        grid: Grid | None = None,
    ) -> bool:
        """Queues an image's tiles; False if the key is cached or already waiting (single flight).

        A cached entry with another number of rows than the tiles give is not the key's. The key must be held
        in the cache, or the job is dropped. An earlier failure of the key is forgotten: asking again is a new
        attempt. `grid`: the image's, which a packer needs.
        """
        if not len(tiles):
            raise ValueError("an image must have at least one tile")
        cached = self.cache.get(key)
        if cached is not None:
            if len(cached) == self._rows_of_image(tiles, grid):
                return False
            self.cache.drop(key)
        job = self._jobs.get(key)
        if job is not None:
            self.counters.joined += 1
            if priority == "interactive":
                self.promote(key)
            return False
        self.cache.forget_failure(key)
        job = _Job(key, tiles, self._clock(), priority, grid)
        self._jobs[key] = job
        self._queues[priority].append(job)
        return True

    def _rows_of_image(self, tiles: np.ndarray, grid: Grid | None) -> int:
        if self._packer is None or grid is None:
            return self._num_rows(tiles)
        return self._packer.rows_of_image(grid)

    def promote(self, key: str) -> None:
        """An interactive request wants a key that waits: its tiles are interactive now, by their arrival."""
        job = self._jobs.get(key)
        if job is not None and job.priority == "batch":
            self._queues["batch"].remove(job)
            job.priority = "interactive"
            queue = self._queues["interactive"]
            queue.insert(sum(1 for other in queue if other.since <= job.since), job)

    def cancel(self, key: str) -> None:
        """Drops a waiting key whatever its holders; what is being encoded at this moment is thrown away."""
        job = self._jobs.pop(key, None)
        if job is not None:
            self._queues[job.priority].remove(job)
            self.counters.dropped += 1

    def fail(self, key: str, failure: Failure) -> None:
        """The key's tiles can't be had: a failure like the encoder's own, kept while the key is held."""
        self.cancel(key)
        self.cache.fail(key, failure)

    def waiting(self, key: str) -> bool:
        return key in self._jobs

    def failed(self, key: str) -> Failure | None:
        """(code, message) if the key failed; remembered while somebody holds the key."""
        return self.cache.failure(key)

    @property
    def num_waiting_tiles(self) -> int:
        return sum(job.left for job in self._jobs.values())

    def due_in(self) -> float | None:
        """Seconds until `plan` has something, 0 if at once, None if nothing waits."""
        jobs = [job for job in self._jobs.values() if job.left and self._wanted(job)]
        if not jobs:
            return None
        if sum(job.left for job in jobs) >= self.max_tiles or any(job.planned for job in jobs):
            return 0.0
        return max(0.0, min(job.since for job in jobs) + self.max_wait_s - self._clock())

    def step(self, max_tiles: int | None = None) -> StepResult:
        """Encodes at most one batch of `max_tiles` tiles (default: the batcher's); empty if none is due."""
        batch = self.plan(max_tiles)
        return self.commit(batch, self.encode(batch)) if batch is not None else StepResult()

    def plan(self, max_tiles: int | None = None) -> TileBatch | None:
        """The next batch, or None if nothing is due. Every tile is planned once."""
        limit = self.max_tiles if max_tiles is None else max_tiles
        if limit < 1:
            raise ValueError("max_tiles must be at least 1")
        self._forget_unwanted()
        if self.due_in() != 0.0:
            return None
        self._turn = self.next_class
        if self._turn == "batch":
            limit = min(limit, self.max_batch_tiles)
        queue = self._queues[self._turn]
        batch = self._take([job for job in queue if job.left], limit)
        job = self._jobs[batch.slices[0].key]
        if job.left:
            queue.remove(job)
            queue.append(job)
        return batch

    def _take(self, jobs: Sequence[_Job], limit: int) -> TileBatch:
        """Their next tiles in order: at least one, at most `limit`, no more than the step has time for."""
        slices: list[TileSlice] = []
        room, budget, work = limit, self._budget.left(), 0.0
        for job in jobs:
            one = self._work(job.tiles[:1])
            fit = min(job.left, int(min((budget - work) / one, room)))
            fit = fit if slices else max(1, fit)
            if fit > 0:
                start, job.planned = job.planned, job.planned + fit
                slices.append(TileSlice(job.key, start, job.planned, job.tiles))
                room, work = room - fit, work + fit * one
            if job.left:
                break
        return TileBatch(tuple(slices), work)

    def encode(self, batch: TileBatch) -> list[Any | Failure]:
        """Rows of each slice, or what went wrong with it alone."""
        self.counters.steps += 1
        self.counters.tiles += batch.num_tiles
        started = self._clock()
        rows = self._attempt(batch.slices)
        if isinstance(rows, list):
            self._budget.observe(batch.work, self._clock() - started)
            return rows
        if len(batch.slices) == 1:
            return [rows]
        alone = [self._attempt((part,)) for part in batch.slices]
        return [one[0] if isinstance(one, list) else one for one in alone]

    def commit(self, batch: TileBatch, rows: Sequence[Any | Failure]) -> StepResult:
        """Stores what is complete; a slice of a key that was cancelled meanwhile is ignored."""
        finished: list[str] = []
        failures: list[tuple[str, Failure]] = []
        for part, result in zip(batch.slices, rows, strict=True):
            job = self._jobs.get(part.key)
            if job is None or job.tiles is not part.tiles:
                continue
            if isinstance(result, tuple):
                self._finish(job)
                self.cache.fail(job.key, result)
                failures.append((job.key, result))
                continue
            job.parts[part.start] = result
            job.encoded += part.stop - part.start
            if job.encoded == len(job.tiles):
                self._finish(job)
                rows_in_order = [job.parts[start] for start in sorted(job.parts)]
                whole = rows_in_order[0] if len(rows_in_order) == 1 else self._concat(rows_in_order)
                if self._packer is not None and job.grid is not None:
                    whole = self._packer.pack(whole, job.grid)
                self.cache.put(job.key, whole)
                finished.append(job.key)
        return StepResult(tuple(finished), tuple(failures), batch.num_tiles)

    def check_integrity(self) -> None:
        """Raises AssertionError if queues and jobs disagree."""
        queued = [job for queue in self._queues.values() for job in queue]
        assert len(queued) == len(self._jobs) == len({job.key for job in queued})
        assert all(self._jobs[job.key] is job for job in queued)
        assert all(0 <= job.encoded <= job.planned <= len(job.tiles) for job in queued)
        assert all(job.priority == name for name, queue in self._queues.items() for job in queue)
        assert not any(self.cache.failure(key) for key in self._jobs)

    def _attempt(self, slices: Sequence[TileSlice]) -> list[Any | Failure] | Failure:
        self.counters.encode_calls += 1
        try:
            rows = list(self._encode([part.tiles[part.start : part.stop] for part in slices]))
        except Exception:
            log.exception("encoding a batch of %d slices failed", len(slices))
            return ENCODE_FAILED
        if len(rows) != len(slices):
            return WRONG_COUNT
        return [
            result if len(result) == self._num_rows(part.tiles[part.start : part.stop]) else WRONG_COUNT
            for part, result in zip(slices, rows, strict=True)
        ]

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.key]
        self._queues[job.priority].remove(job)

    @property
    def next_class(self) -> Priority:
        """Whose tiles the next batch takes."""
        waiting = {name: [job for job in queue if job.left] for name, queue in self._queues.items()}
        if not waiting["batch"]:
            return "interactive"
        if not waiting["interactive"]:
            return "batch"
        aged = self._clock() - min(job.since for job in waiting["batch"]) >= self.ageing_s
        return "batch" if aged and self._turn == "interactive" else "interactive"

    def _wanted(self, job: _Job) -> bool:
        return self.cache.holds(job.key) > 0 and job.key not in self.cache

    def _forget_unwanted(self) -> None:
        """Jobs with tiles left that no request holds or that came another way."""
        for job in [job for job in self._jobs.values() if job.left and not self._wanted(job)]:
            self.cancel(job.key)


def _torch_concat(parts: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(parts))
