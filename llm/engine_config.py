"""Every knob of the engine, with its default in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["auto", "recompute", "swap"]
SwapRule = Callable[[int, int], bool]
"""(tokens to recompute, blocks to copy) -> whether swapping to host memory is cheaper."""
PaysRule = Callable[[int, int], bool]
"""(sequences in a step, guesses for each) -> whether verifying them costs little more than not guessing."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_running: int = 16  # slots: sequences that may run at once
    max_step_tokens: int = 2048  # one budget for decodes and chunks of prompts
    min_chunk_tokens: int = 4  # a step carries at least this much of a waiting prompt
    max_batch_chunk_tokens: int = 256  # of prompts in a step without interactive work: it must be short
    step_stretch: float | None = 2.0  # longest mixed step, in steps of decodes alone; None: fixed budget
    max_step_ms: float = 500.0  # no step that carries chunks is planned to take longer
    min_alone_tokens: int = 64  # but one without decodes carries so many
    max_logit_rows: int = 256  # rows a step may compute for prompt log-probabilities
    prefix_cache: bool = True
    preemption: PreemptionMode = "auto"
    swap_rule: SwapRule | None = None  # asked in mode "auto"; None: recompute
    ageing_s: float = 30.0  # a batch request goes before interactive ones that came this much later
    visual_lookahead: int = 16  # waiting requests whose images may be asked for
    max_image_tokens: int | None = None  # per request
    speculation: Literal["off", "ngram"] = "off"
    num_draft: int = 4  # most guesses verified with one decode
    speculation_rule: PaysRule | None = None  # asked every step; None: guesses always pay
    batching: Literal["continuous", "static"] = "continuous"  # static: admit only into an empty batch

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.min_chunk_tokens < 1 or self.max_logit_rows < 1:
            raise ValueError("max_running, min_chunk_tokens and max_logit_rows must be at least 1")
        if self.max_step_tokens < 1 or self.max_batch_chunk_tokens < 1 or self.min_alone_tokens < 1:
            raise ValueError(
                "max_step_tokens, max_batch_chunk_tokens and min_alone_tokens must be at least 1"
            )
        if self.step_stretch is not None and self.step_stretch <= 1.0:
            raise ValueError("step_stretch must be above 1, or None")
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError("preemption must be auto, recompute or swap")
        if self.speculation not in ("off", "ngram") or self.num_draft < 1:
            raise ValueError("speculation must be off or ngram, num_draft at least 1")
        if self.batching not in ("continuous", "static"):
            raise ValueError("batching must be continuous or static")
