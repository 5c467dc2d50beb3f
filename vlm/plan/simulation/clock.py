"""The clock of a simulation: requests on their way, the steps that move them, and the books of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from llm.cost import (
    Bound,
    Chunk,
    CostError,
    DecoderShape,
    Machine,
    Precision,
    StepTime,
    kv_bytes,
    kv_capacity_bytes,
    step_time,
)
from vlm.plan.simulation.workload import Arrival

Policy = Literal["static", "dynamic", "continuous", "chunked", "disaggregated"]
POLICIES: tuple[Policy, ...] = ("static", "dynamic", "continuous", "chunked", "disaggregated")


@dataclass(frozen=True, slots=True)
class Rules:
    policy: Policy = "chunked"
    slots: int = 8  # sequences decoded together
    window_s: float = 0.05  # dynamic: how long a group waits to fill
    token_budget: int = 512  # chunked: tokens of a step
    prefill_devices: int = 1  # disaggregated: devices that only prefill

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise CostError(f"policies: {', '.join(POLICIES)}")
        if min(self.slots, self.token_budget, self.prefill_devices) < 1 or self.window_s < 0:
            raise CostError("slots, token budget and devices are at least 1, the window at least 0 s")
        if self.policy == "chunked" and self.token_budget <= self.slots:
            raise CostError("the token budget is above the slots, or no prompt would ever advance")


@dataclass(slots=True)
class Track:
    """One request on its way."""

    index: int
    request: Arrival
    start_s: float = -1.0  # first scheduled
    token_s: list[float] = field(default_factory=list)  # when each token came
    prefilled: int = 0
    slot: int = -1
    blocked_by_memory: bool = False

    @property
    def done(self) -> bool:
        return len(self.token_s) >= self.request.output_tokens

    @property
    def context(self) -> int:
        """Positions in the cache: the last token isn't there yet."""
        return self.request.prompt_tokens + max(0, len(self.token_s) - 1)


@dataclass(frozen=True, slots=True)
class Span:
    """What a slot did between two times."""

    slot: int
    start_s: float
    end_s: float
    kind: Literal["prefill", "decode", "idle"]
    request: int


@dataclass(slots=True)
class Simulation:
    """What happened: the tracks, the slots' spans, and who bound each second."""

    rules: Rules
    tracks: list[Track]
    spans: list[Span] = field(default_factory=list)
    busy_slot_steps: int = 0
    slot_steps: int = 0  # held, or wanted by a request that waited
    num_steps: int = 0
    bound_s: dict[Bound, float] = field(default_factory=dict)

    @property
    def slot_use(self) -> float:
        """Share of the slot steps that were held or wanted in which a slot did something."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def end_s(self) -> float:
        return max(track.token_s[-1] for track in self.tracks)


class Clock:
    """Runs steps and books what they did."""

    def __init__(
        self,
        shape: DecoderShape,
        machine: Machine,
        precision: Precision,
        rules: Rules,
        requests: Sequence[Arrival],
    ) -> None:
        self.shape, self.machine, self.precision, self.rules = shape, machine, precision, rules
        self.now = 0.0
        self.sim = Simulation(rules, [Track(i, request) for i, request in enumerate(requests)])
        self.waiting: deque[Track] = deque(sorted(self.sim.tracks, key=lambda t: t.request.arrival_s))
        self.room = kv_capacity_bytes(shape, machine, precision)
        self.reserved = 0
        self._last_span: dict[int, int] = {}  # slot -> its latest span
        for track in self.sim.tracks:
            if self.need(track) > self.room:
                raise CostError("a request's cache is larger than the device's memory leaves room for")

    def need(self, track: Track) -> int:
        """Bytes of cache that a request holds at its end."""
        length = track.request.prompt_tokens + track.request.output_tokens
        return kv_bytes(self.shape, length, self.precision.kv_bytes)

    def arrived(self) -> int:
        return sum(1 for _ in takewhile(lambda track: track.request.arrival_s <= self.now, self.waiting))

    def admit(self, free_slots: Sequence[int]) -> list[Track]:
        """Waiting requests in order of arrival, as far as slots and memory reach."""
        admitted: list[Track] = []
        for slot in free_slots:
            if not self.waiting or self.waiting[0].request.arrival_s > self.now:
                break
            if self.reserved + self.need(self.waiting[0]) > self.room:
                self.waiting[0].blocked_by_memory = True
                break
            track = self.waiting.popleft()
            track.slot, track.start_s = slot, self.now
            self.reserved += self.need(track)
            admitted.append(track)
        return admitted

    def release(self, track: Track) -> None:
        self.reserved -= self.need(track)

    def wait_for_arrival(self) -> None:
        self.now = max(self.now, self.waiting[0].request.arrival_s)

    def step(self, work: Sequence[tuple[Track, Chunk]], idle: Sequence[Track] = ()) -> None:
        """One pass over `work`; `idle` tracks hold a slot, and are computed as padding, without a result."""
        held = len(work) + len(idle)
        wanted = max(held, min(self.rules.slots, held + self.arrived()))
        padding = [Chunk(1, track.context, 0) for track in idle]
        time = step_time(self.shape, self.machine, [chunk for _, chunk in work] + padding, self.precision)
        start, self.now = self.now, self.now + time.seconds
        for track, chunk in work:
            prefilling = track.prefilled < track.request.prompt_tokens
            if prefilling:
                track.prefilled += chunk.new_tokens
            if chunk.num_logits:
                track.token_s.append(self.now)
            self._span(track, start, "prefill" if prefilling else "decode")
        for track in idle:
            self._span(track, start, "idle")
        self._count(time, len(work), wanted)

    def _count(self, time: StepTime, busy: int, wanted: int) -> None:
        self.sim.num_steps += 1
        self.sim.busy_slot_steps += busy
        self.sim.slot_steps += wanted
        self.sim.bound_s[time.binds] = self.sim.bound_s.get(time.binds, 0.0) + time.seconds

    def _span(self, track: Track, start: float, kind: Literal["prefill", "decode", "idle"]) -> None:
        """Books what a slot did; the same thing going on lengthens its span."""
        spans, index = self.sim.spans, self._last_span.get(track.slot)
        if index is not None:
            last = spans[index]
            if (last.kind, last.request, last.end_s) == (kind, track.index, start):
                spans[index] = replace(last, end_s=self.now)
                return
        self._last_span[track.slot] = len(spans)
        spans.append(Span(track.slot, start, self.now, kind, track.index))
