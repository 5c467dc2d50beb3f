"""One engine and one encoder on one device, stepped together: tiles in, text out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from llm.engine import Engine
from llm.request import Event, Failed, Finished, Priority, Request, VisualKey, WantVisual
from llm.visuals import VisualSource
from preprocess.types import Tiles
from workers.contract.streams import is_last
from workers.local.delta_pieces import Pieces
from workers.local.disk_cache import DiskCache


class CachedVisuals:
    """`llm.visuals.VisualSource` over the encoder's cache and batcher."""

    def __init__(self, batcher: TileBatcher) -> None:
        self._cache: VisualCache = batcher.cache
        self._batcher = batcher

    def get(self, key: VisualKey) -> Any | None:
        return self._cache.get(key)

    def hold(self, key: VisualKey) -> None:
        self._cache.hold(key)

    def release(self, key: VisualKey) -> None:
        self._cache.release(key)

    def drop(self, key: VisualKey) -> None:
        self._cache.drop(key)

    def failed(self, key: VisualKey) -> tuple[str, str] | None:
        return self._batcher.failed(key)


class EngineRunner:
    """Steps the encoder's batcher and the engine in turn, so that an encode delays a running stream by one
    tile batch at most: of `busy_max_tiles` tiles while an interactive answer runs, as nobody reads batch work
    along. A tile is not cut: after one that took longer than a step should, running answers get as much time
    as it took before the next, so that a short one waits for one tile and not for one with every token.

    What arrives waits for one turn of each at most. What is interactive waits for the turn under way alone:
    whichever of the two takes it up passes the other, once in a row, if the other has batch work only.
    Not thread-safe: one owner.
    """

    def __init__(
        self,
        batcher: TileBatcher,
        make_engine: Callable[[VisualSource], Engine],
        *,
        about: dict[str, Any] | None = None,
        busy_max_tiles: int = 1,
        disk: DiskCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batcher = batcher
        self._visuals = CachedVisuals(batcher)
        self.engine = make_engine(self._visuals)
        self._about = about or {}
        self._disk = disk  # where visual tokens outlive this process
        self._busy_max_tiles = min(busy_max_tiles, batcher.max_tiles)
        self._priorities: dict[str, Priority] = {}  # of live requests
        # the latest turn: the engine's step, or whose tiles
        self._latest: Literal["step", "interactive", "batch"] = "step"
        self._was_out_of_turn = False  # that turn
        self._clock = clock
        self._owed_s = 0.0  # to running answers, for tiles that took too long
        self._has_arrived = False  # an interactive request, since the engine's latest step
        self._pieces = Pieces(self._priorities.get)
        self._wanted: dict[VisualKey, Priority] = {}  # keys asked for whose tiles have not come

    def info(self) -> dict[str, Any]:
        """What this runner serves: model, backend, sizes."""
        return dict(self._about)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or self._batcher.due_in() == 0.0

    def submit(self, request: Request) -> None:
        """Raises `RequestError` for what can never be served."""
        self.engine.submit(request)
        for key in {span.key for span in request.prompt.spans}:
            self._batcher.cache.query(key)
        self._priorities[request.id] = request.priority
        self._has_arrived |= request.priority == "interactive"

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self._forget(request_id)

    def put_tiles(self, key: VisualKey, tiles: Tiles) -> None:
        priority = self._wanted.pop(key, "interactive")
        self._batcher.put_tiles(key, tiles.pixels, priority, tiles.grid)

    def put_visual(self, key: VisualKey, rows: Any) -> None:
        """Visual tokens that were computed elsewhere."""
        self._wanted.pop(key, None)
        self._batcher.cancel(key)
        self._batcher.cache.put(key, rows)

    def visual(self, key: VisualKey) -> Any | None:
        """Visual tokens of the process's cache."""
        return self._batcher.cache.get(key)

    def visual_failed(self, key: VisualKey) -> tuple[str, str] | None:
        return self._batcher.failed(key)

    def wanted(self, key: VisualKey) -> bool:
        """A live request needs it."""
        return self._batcher.cache.holds(key) > 0

    def encoding(self, key: VisualKey) -> bool:
        """Its tiles are here and not all encoded."""
        return self._batcher.waiting(key)

    def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        self._wanted.pop(key, None)
        self._batcher.fail(key, (code, message))

    def step(self) -> list[Event]:
        """One tile batch or one engine step, in turn while both have work."""
        started = self._clock()
        if self._are_tiles_next():
            self._latest = self._batcher.next_class
            busy = self.engine.has_interactive_running
            self._keep(self._batcher.step(self._busy_max_tiles if busy else None).finished)
            taken_s, longest_s = self._clock() - started, self._batcher.max_step_s
            self._owed_s = taken_s if longest_s is not None and taken_s > longest_s else 0.0
            return []
        self._latest, self._has_arrived = "step", False
        told = self._pieces.join(self.engine.step())
        self._owed_s -= self._clock() - started
        return [event for event in told if self._note(event)]

    def _are_tiles_next(self) -> bool:
        """Whether tiles take this turn; notes whether the turn is out of order."""
        was_out_of_turn, self._was_out_of_turn = self._was_out_of_turn, False
        if self._batcher.due_in() != 0.0:
            return False
        if not self.engine.has_work:
            return True
        if self._owed_s > 0 and self.engine.has_interactive_running:
            return False
        tiles, in_turn = self._batcher.next_class, self._latest == "step"
        if in_turn:
            passes = tiles == "batch" and self._has_arrived
        else:
            behind = self._has_arrived or self.engine.has_interactive_running
            passes = tiles == "interactive" and self._latest == "batch" and not behind
        self._was_out_of_turn = passes and not was_out_of_turn
        return in_turn != self._was_out_of_turn

    def _keep(self, keys: tuple[str, ...]) -> None:
        for key in keys if self._disk is not None else ():
            rows = self._batcher.cache.get(key)
            if rows is not None and self._disk is not None:
                self._disk.keep_visual(VisualKey(key), rows)

    def _find_kept(self, key: VisualKey) -> bool:
        """Whether the disk had an image's visual tokens: they are in the cache now."""
        rows = None if self._disk is None else self._disk.visual(key)
        if rows is None:
            return False
        self.put_visual(key, rows)
        return True

    def _note(self, event: Event) -> bool:
        """Keeps the books; False for a wish that is granted, or whose tiles have come for another request."""
        match event:
            case WantVisual(request_id=request_id, key=key):
                priority = self._priorities.get(request_id, "interactive")
                if self._batcher.waiting(key):
                    if priority == "interactive":
                        self._batcher.promote(key)
                    return False
                if self._find_kept(key):
                    return False
                if priority == "interactive" or key not in self._wanted:
                    self._wanted[key] = priority
            case Failed() | Finished() if is_last(event):
                self._forget(event.request_id)
        return True

    def _forget(self, request_id: str) -> None:
        for key in [key for key in self._wanted if not self.wanted(key)]:
            del self._wanted[key]  # its tiles were called off with the request
        self._priorities.pop(request_id, None)
        self._pieces.forget(request_id)

    def stats(self) -> dict[str, Any]:
        cache = self._batcher.cache
        return {
            "engine": asdict(self.engine.stats()),
            "visual_cache": {**asdict(cache.counters), "bytes": cache.num_bytes, "entries": len(cache)},
            **({} if self._disk is None else {"disk": {"bytes": self._disk.used_bytes}}),
            "encoder": {**asdict(self._batcher.counters), "waiting_tiles": self._batcher.num_waiting_tiles},
        }

    def clear_cache(self) -> None:
        self._batcher.cache.clear()
        self.engine.clear_prefix_cache()

    def check_integrity(self) -> None:
        self._batcher.check_integrity()
        self._batcher.cache.check_integrity()
        self.engine.check_integrity()
