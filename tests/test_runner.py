"""Whose turn it is: the engine's step or a batch of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from llm.request import Priority, Prompt, Request, SamplingParams, VisualKey, WantVisual
from preprocess.types import TileGrid, Tiles
from workers.local.engine_runner import EngineRunner


class EndlessEngine:
    """Always has a step of batch work to do; notes what each step takes up."""

    has_work = True
    has_interactive_running = False

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._new: list[str] = []

    def submit(self, request: Request) -> None:
        self._new.append(request.id)

    def step(self) -> list[Any]:
        self._log.append("step " + " ".join(self._new))
        self._new.clear()
        return []


class Rig:
    """A runner over an engine that only counts, and an encoder that notes whose tiles it gets."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.cache = VisualCache(1 << 30)
        self.batcher = TileBatcher(
            self._encode,
            self.cache,
            num_rows=len,
            max_batch_tiles=1,
            clock=lambda: self.now,
        )
        self.engine = EndlessEngine(self.log)
        self.runner = EngineRunner(self.batcher, lambda _: self.engine)  # type: ignore[arg-type,return-value]
        self.count = 0

    def _encode(self, slices: Any) -> list[np.ndarray]:
        self.log.append("tiles " + " ".join(str(int(part[0, 0, 0, 0])) for part in slices))
        return [np.zeros((len(part), 4), np.float32) for part in slices]

    def tiles(self, priority: Priority) -> str:
        self.count += 1
        number = self.count % 250
        key = VisualKey(f"{self.count}")
        self.cache.hold(key)
        pixels = np.full((1, 2, 2, 3), number, np.uint8)
        self.runner._wanted[key] = priority
        self.runner.put_tiles(key, Tiles(pixels, TileGrid(0, 0, True, 2, 2)))
        return str(number)

    def request(self, priority: Priority) -> str:
        self.count += 1
        name = f"request-{self.count}"
        self.runner.submit(Request(name, Prompt((1,)), SamplingParams(), priority))
        return name


HISTORY = st.lists(st.sampled_from(["tiles", "request", "step"]), max_size=30)


def batch_work(rig: Rig, history: list[str]) -> None:
    for kind in history:
        if kind == "step":
            rig.runner.step()
        elif kind == "tiles":
            rig.tiles("batch")
        else:
            rig.request("batch")


@given(HISTORY)
def test_an_interactive_request_is_taken_up_by_the_next_step_whatever_batch_work_is_due(
    history: list[str],
) -> None:
    rig = Rig()
    batch_work(rig, history)
    name = rig.request("interactive")
    rig.runner.step()
    assert rig.log[-1].startswith("step") and name in rig.log[-1]


@given(HISTORY)
def test_interactive_tiles_are_encoded_by_the_next_step_whatever_batch_work_is_due(
    history: list[str],
) -> None:
    rig = Rig()
    batch_work(rig, history)
    name = rig.tiles("interactive")
    rig.runner.step()
    assert rig.log[-1] == f"tiles {name}"


@given(HISTORY)
def test_a_turn_without_tiles_due_ends_the_row_of_turns_out_of_order(history: list[str]) -> None:
    rig = Rig()
    batch_work(rig, history)
    for _ in range(3):
        rig.tiles("batch")
        name = rig.request("interactive")
        rig.runner.step()
        assert rig.log[-1].startswith("step") and name in rig.log[-1]
        for key in range(rig.count + 1):
            rig.batcher.cancel(str(key))
        rig.runner.step()


@given(st.lists(st.sampled_from(["tiles", "request", ""]), min_size=12, max_size=40))
def test_neither_tiles_nor_the_engine_wait_for_more_than_two_steps_of_the_other(arrivals: list[str]) -> None:
    rig = Rig()
    for _ in range(len(arrivals) + 5):
        rig.tiles("batch")
    for arrival in arrivals:
        if arrival == "tiles":
            rig.tiles("interactive")
        elif arrival == "request":
            rig.request("interactive")
        rig.runner.step()
    kinds = "".join(entry[0] for entry in rig.log)
    assert "sss" not in kinds and "ttt" not in kinds


@given(HISTORY)
def test_tiles_never_pass_a_step_that_somebody_reads(history: list[str]) -> None:
    rig = Rig()
    rig.engine.has_interactive_running = True
    batch_work(rig, history)
    for _ in range(6):
        rig.tiles("batch")
        rig.tiles("interactive")
        rig.runner.step()
    kinds = "".join(entry[0] for entry in rig.log)
    assert "tt" not in kinds


class WishingEngine(EndlessEngine):
    """Tells what it was given to tell."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.events: list[Any] = []

    def step(self) -> list[Any]:
        events, self.events = self.events, []
        return super().step() + events

    def cancel(self, request_id: str) -> None: ...


def wishing_rig() -> tuple[Rig, WishingEngine]:
    rig = Rig()
    engine = WishingEngine(rig.log)
    rig.runner.engine = engine  # type: ignore[assignment]
    return rig, engine


def test_tiles_of_batch_work_that_an_interactive_request_wants_go_first() -> None:
    """S7: they are here already, so that its wish brings no others that would say so."""
    rig, engine = wishing_rig()
    others = [rig.tiles("batch") for _ in range(3)]
    wanted = rig.tiles("batch")
    name = rig.request("interactive")
    engine.events = [WantVisual(name, VisualKey(wanted))]
    rig.runner.step()
    assert rig.log[-1] == f"step {name}"
    rig.runner.step()
    assert rig.log[-1] == f"tiles {wanted}" and others
    rig.runner._batcher.check_integrity()


def test_wishes_that_were_called_off_are_forgotten() -> None:
    """C7: a client that leaves takes its images' decoding along, so no tiles come that would end the wish."""
    rig, engine = wishing_rig()
    for _ in range(3):
        name = rig.request("interactive")
        key = VisualKey(f"image of {name}")
        rig.cache.hold(key)
        engine.events = [WantVisual(name, key)]
        rig.runner.step()
        assert key in rig.runner._wanted
        rig.cache.release(key)
        rig.runner.cancel(name)
    assert not rig.runner._wanted


class AnsweringEngine:
    """Interactive requests of a number of steps each, all in every step, on the rig's clock."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._new: list[list[int]] = []
        self._running: list[list[int]] = []  # steps left

    @property
    def has_work(self) -> bool:
        return bool(self._new or self._running)

    @property
    def has_interactive_running(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> None:
        self._new.append([request.params.max_tokens])

    def step(self) -> list[Any]:
        self._tick()
        self._running += self._new
        self._new = []
        for left in self._running:
            left[0] -= 1
        self._running = [left for left in self._running if left[0]]
        return []


@settings(deadline=None)
@given(
    tile_s=st.floats(0.01, 100.0),
    budget_s=st.floats(0.1, 1.0),
    share=st.floats(0.02, 0.3),
    arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=8),
)
def test_a_short_answer_waits_for_one_piece_of_an_encode_and_not_for_one_with_every_token(
    tile_s: float, budget_s: float, share: float, arrivals: list[int]
) -> None:
    """Any tower, however slow, and requests at any time: one that needs less time than a piece is answered
    within a piece and its own steps, or, where tiles are within the budget, a piece with every step."""
    rig = Rig()
    step_s = share * max(tile_s, 0.01)
    pieces: list[float] = []

    def encode(slices: Any) -> list[np.ndarray]:
        rig.now += tile_s * sum(len(part) for part in slices)
        pieces.append(tile_s * sum(len(part) for part in slices))
        return [np.zeros((len(part), 4), np.float32) for part in slices]

    def tick() -> None:
        rig.now += step_s

    rig.batcher = TileBatcher(encode, rig.cache, num_rows=len, max_step_s=budget_s, clock=lambda: rig.now)
    engine = AnsweringEngine(tick)
    rig.runner = EngineRunner(rig.batcher, lambda _: engine, clock=lambda: rig.now)  # type: ignore[arg-type,return-value]
    for _ in range(13 * len(arrivals)):
        rig.tiles("interactive")
    for gap in arrivals:
        for _ in range(gap):
            rig.runner.step()
        pieces.clear()
        steps = int(1 / share) - 1
        rig.runner.submit(
            Request(f"{rig.now}", Prompt((1,)), SamplingParams(max_tokens=steps), "interactive")
        )
        while engine.has_work:
            rig.runner.step()
        assert all(piece <= max(budget_s, tile_s) * 1.001 for piece in pieces)
        assert len(pieces) <= (1 if tile_s > budget_s else steps)
