"""What the engine counts: of itself (counters only grow, the rest is a snapshot), and of one request."""

from __future__ import annotations

from dataclasses import dataclass

from llm.request import Timings, Usage
from llm.scheduling.sequence import Group


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0
    failed_steps: int = 0
    slots_offered: int = 0  # slots x steps
    slots_used: int = 0  # sequences that were computed, over all steps
    chunk_tokens: int = 0  # computed beside decodes: prompts, and what is recomputed
    generated_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    failed: int = 0
    cancelled: int = 0
    step_ms_ema: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int  # sequences
    waiting: int  # requests
    kv_blocks: int
    kv_blocks_held: int
    kv_blocks_cached: int  # not held, findable
    evictions: int
    visuals_missing: int  # distinct keys awaited
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preempted_recompute: int
    preempted_swap: int
    kv_saved_read: int  # blocks from beyond the pool
    kv_saved_written: int
    kv_saved_dropped: int  # for which the store had no room
    steps: int
    failed_steps: int
    slots_offered: int
    slots_used: int
    chunk_tokens: int
    generated_tokens: int
    drafted_tokens: int  # guesses verified
    accepted_tokens: int  # of these, right
    finished_stop: int
    finished_length: int
    failed: int
    cancelled: int
    step_ms_ema: float

    @property
    def slot_use(self) -> float:
        return self.slots_used / self.slots_offered if self.slots_offered else 0.0


def usage_of(group: Group) -> Usage:
    prompt = group.request.prompt
    return Usage(prompt.num_tokens, prompt.num_image_tokens, group.num_cached or 0, group.num_completion)


def timings_of(group: Group, now: float) -> Timings:
    """queue + encode + prefill = time to first token."""
    first_token = group.first_token_s if group.first_token_s is not None else now
    scheduled = group.first_scheduled_s if group.first_scheduled_s is not None else first_token
    queue_s = max(scheduled - group.submitted_s - group.encode_s, 0.0)
    ttft_s = first_token - group.submitted_s
    gaps = max(group.num_longest - 1, 1)
    return Timings(
        queue_ms=queue_s * 1e3,
        encode_ms=group.encode_s * 1e3,
        prefill_ms=max(ttft_s - queue_s - group.encode_s, 0.0) * 1e3,
        ttft_ms=ttft_s * 1e3,
        tpot_ms=(group.last_token_s - first_token) / gaps * 1e3,
        total_ms=(now - group.submitted_s) * 1e3,
    )
