"""What running answers see while an image span arrives whose positions see each other.

Rule: a chunk never ends inside such a span, so one step takes all of it. That step carries no other part of a
prompt, so the longest gap between two tokens is a step of decodes and the span's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llm.backend.base import Backend
from llm.checkpoint.decoder_weights import load_backend
from llm.decoder_config import TextNames
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.request import Delta, ImageSpan, Prompt, Request, SamplingParams, VisualKey
from vlm.bench.decoding.gemma3_slice import MODEL, SPAN_TOKENS, gemma3_slice
from vlm.bench.harness.engine_load import gaps
from vlm.bench.harness.results import LEAST_S, result, spread
from vlm.checkpoint import Checkpoint

STREAMS = 8
_BLOCK = 16
_PROMPT, _ANSWER = 32, 48  # tokens of a stream
_ARRIVES = 12  # the first stream's token with which it does
_KEY = VisualKey("0" * 64)


class _Rows:
    """Implements VisualSource: the same visual tokens for every key, always there."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def get(self, key: VisualKey) -> np.ndarray:
        return self._rows

    def hold(self, key: VisualKey) -> None: ...

    def release(self, key: VisualKey) -> None: ...

    def drop(self, key: VisualKey) -> None: ...

    def failed(self, key: VisualKey) -> None: ...


class _NoText:
    """Implements TokenText and its decoder, for random weights say nothing."""

    strips_first_space = False

    def decoder(self, skip_special: bool | None = None) -> _NoText:
        return self

    def push(self, token_ids: tuple[int, ...]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def span_stalls(rounds: int, **changes: Any) -> dict[str, dict[str, Any]]:
    """Longest gap over the median gap of eight streams, in CPU time, beside a span and beside as many tokens
    of text, which are computed in chunks. `changes`: of the slice's config."""
    with gemma3_slice(**changes) as directory:
        config = replace(Checkpoint.read(directory).decoder, whole_spans=True)
        blocks = STREAMS * (_PROMPT + _ANSWER) // _BLOCK + 2 * SPAN_TOKENS // _BLOCK + STREAMS
        backend = load_backend(directory, config, TextNames(), num_blocks=blocks, dtype="bfloat16")
    rows = np.random.default_rng(0).standard_normal((SPAN_TOKENS, config.d_model), np.float32)
    about = {"model": MODEL, "dtype": "bfloat16", "threads": 1, "batch": STREAMS, "context": _PROMPT}
    figures = {}
    prompts = {"span": _span_prompt(), "text": Prompt(_ids(99, SPAN_TOKENS + 2))}
    for kind, prompt in prompts.items():
        rounds_of = [_round(backend, rows, prompt) for _ in range(rounds + 1)][1:]  # the first one warms up
        ratios = [longest / median for longest, median, _ in rounds_of]
        bounds = [(median + alone) / median for _, median, alone in rounds_of]
        figures[f"itl_max_over_p50_{kind}"] = result(
            statistics.median(ratios),
            "ratio of CPU time",
            **about,
            arriving_tokens=prompt.num_tokens,
            decode_step_ms=1e3 * statistics.median(median for _, median, _ in rounds_of),
            alone_over_p50=statistics.median(bounds),  # a decode step and all of it at once
            spread=spread(ratios),
        )
    return figures


def _ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed + 7 * i) % 500 for i in range(count))


def _span_prompt() -> Prompt:
    return Prompt((1, *[0] * SPAN_TOKENS, 2), (ImageSpan(1, SPAN_TOKENS, _KEY, 0),))


def _round(backend: Backend, rows: np.ndarray, arriving: Prompt) -> tuple[float, float, float]:
    """CPU seconds: the longest gap, the median gap, the arriving prompt alone."""
    engine = Engine(backend, _Rows(rows), EngineConfig(prefix_cache=False), _NoText(), frozenset())
    params = SamplingParams(max_tokens=_ANSWER, ignore_eos=True)
    times: dict[str, list[float]] = {f"s{i}": [] for i in range(STREAMS)}
    for i, name in enumerate(times):
        engine.submit(Request(name, Prompt(_ids(i, _PROMPT)), params))
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    _run(engine, times, lambda: engine.submit(Request("arriving", arriving, one)))
    begun = max(stamps[0] for stamps in times.values())
    between = [gap for stamps in times.values() for gap in gaps([at for at in stamps if at >= begun])]
    started = time.process_time()
    engine.submit(Request("alone", arriving, one))
    _run(engine, {}, lambda: None)
    alone = time.process_time() - started
    longest, median, alone = (max(s, LEAST_S) for s in (max(between), statistics.median(between), alone))
    return longest, median, alone


def _run(engine: Engine, times: dict[str, list[float]], arrive: Callable[[], None]) -> None:
    """To the end; `arrive` is called once every stream is under way."""
    has_arrived = False
    while not engine.is_idle:
        events: Sequence[Any] = engine.step()
        now = time.process_time()
        for event in events:
            if isinstance(event, Delta) and event.request_id in times:
                times[event.request_id].append(now)
        if not has_arrived and times and min(map(len, times.values())) >= _ARRIVES:
            arrive()
            has_arrived = True
