"""Event simulation of a scheduler: the same requests under five rules, on the cost core's step times.

A step is one pass of the model; its time is `llm.cost.step_time` of the chunks it holds. Caches are
reserved for a request's whole length when it is admitted, so that nothing is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm.cost import Chunk, CostError, DecoderShape, Machine, Precision, kv_bytes, prefill_time
from vlm.plan.simulation.clock import POLICIES, Clock, Policy, Rules, Simulation, Span, Track
from vlm.plan.simulation.workload import Arrival

__all__ = ["POLICIES", "Policy", "Rules", "Simulation", "Span", "Track", "simulate"]


def _decode(track: Track) -> tuple[Track, Chunk]:
    return track, Chunk(1, track.context)


def _whole_prompt(track: Track) -> tuple[Track, Chunk]:
    return track, Chunk(track.request.prompt_tokens)


def _run_groups(clock: Clock, ready_at: Callable[[Clock], float]) -> None:
    """Static and dynamic batching: a group starts together and keeps its slots until its last member ends."""
    while clock.waiting:
        clock.now = max(clock.now, ready_at(clock))
        group = clock.admit(range(clock.rules.slots))
        clock.step([_whole_prompt(track) for track in group])
        while any(not track.done for track in group):
            live = [track for track in group if not track.done]
            clock.step([_decode(track) for track in live], [track for track in group if track.done])
        for track in group:
            clock.release(track)


def _full_group(clock: Clock) -> float:
    """Static: when as many requests as slots are there, or all that will ever come."""
    return clock.waiting[min(clock.rules.slots, len(clock.waiting)) - 1].request.arrival_s


def _window(clock: Clock) -> float:
    """Dynamic: the window after the group's first arrival, or sooner if the group is full."""
    first = max(clock.now, clock.waiting[0].request.arrival_s)
    full = _full_group(clock) if len(clock.waiting) >= clock.rules.slots else float("inf")
    return min(first + clock.rules.window_s, full) if full > first else first


def _run_continuous(clock: Clock, budget: int | None) -> None:
    """Membership is decided at every step. With a budget, prompts advance in pieces beside all decodes."""
    running: list[Track] = []
    while clock.waiting or running:
        if not running:
            clock.wait_for_arrival()
        taken = {track.slot for track in running}
        running += clock.admit([slot for slot in range(clock.rules.slots) if slot not in taken])
        work = [_decode(track) for track in running if track.prefilled == track.request.prompt_tokens]
        left = None if budget is None else budget - len(work)
        for track in running:
            remaining = track.request.prompt_tokens - track.prefilled
            if not remaining or left == 0:
                continue
            new = remaining if left is None else min(remaining, left)
            work.append((track, Chunk(new, track.prefilled, int(new == remaining))))
            left = None if left is None else left - new
        clock.step(work)
        for track in [track for track in running if track.done]:
            clock.release(track)
            running.remove(track)


def _prefill_elsewhere(clock: Clock) -> list[Track]:
    """Disaggregated: prompts go one by one over the prefill devices; each cache then crosses the link.

    Returns the tracks in the order in which their caches reach the decode device. A prefill device
    shows no slot: its spans carry the slots after the decoders'.
    """
    free_at = [0.0] * clock.rules.prefill_devices
    ready = []
    for track in clock.waiting:
        device = min(range(len(free_at)), key=lambda i: free_at[i])
        track.start_s = max(track.request.arrival_s, free_at[device])
        time = prefill_time(clock.shape, clock.machine, track.request.prompt_tokens, 0, clock.precision)
        free_at[device] = track.start_s + time.seconds
        track.token_s.append(free_at[device])
        track.prefilled = track.request.prompt_tokens
        clock.sim.spans.append(
            Span(clock.rules.slots + device, track.start_s, free_at[device], "prefill", track.index)
        )
        clock.sim.bound_s[time.binds] = clock.sim.bound_s.get(time.binds, 0.0) + time.seconds
        if not track.done:
            ready.append((free_at[device] + _transfer_s(clock, track), track.index, track))
    clock.waiting.clear()
    return [
        Track(index, Arrival(at, track.request.prompt_tokens, track.request.output_tokens))
        for at, index, track in sorted(ready)
    ]


def _transfer_s(clock: Clock, track: Track) -> float:
    if not clock.machine.link_bandwidth:
        raise CostError("disaggregation needs a machine with a link")
    cache = kv_bytes(clock.shape, track.request.prompt_tokens, clock.precision.kv_bytes)
    return cache / clock.machine.link_bandwidth


def _run_disaggregated(clock: Clock) -> None:
    arrivals = _prefill_elsewhere(clock)
    clock.waiting.extend(arrivals)
    running: list[Track] = []
    while clock.waiting or running:
        if not running:
            clock.wait_for_arrival()
        taken = {track.slot for track in running}
        for moved in clock.admit([slot for slot in range(clock.rules.slots) if slot not in taken]):
            track = clock.sim.tracks[moved.index]
            track.slot = moved.slot
            track.blocked_by_memory = moved.blocked_by_memory
            running.append(track)
        clock.step([_decode(track) for track in running])
        for track in [track for track in running if track.done]:
            clock.release(track)
            running.remove(track)


def simulate(
    shape: DecoderShape,
    machine: Machine,
    requests: Sequence[Arrival],
    rules: Rules,
    precision: Precision | None = None,
) -> Simulation:
    """Runs all requests to their end.

    Raises CostError if there are none or one alone doesn't fit.
    """
    if not requests:
        raise CostError("there must be at least one request")
    clock = Clock(shape, machine, precision or Precision(), rules, requests)
    if rules.policy == "static":
        _run_groups(clock, _full_group)
    elif rules.policy == "dynamic":
        _run_groups(clock, _window)
    elif rules.policy == "disaggregated":
        _run_disaggregated(clock)
    else:
        _run_continuous(clock, rules.token_budget if rules.policy == "chunked" else None)
    return clock.sim
