"""OpenTelemetry spans over the stages of a request: an option, and a null object without it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from llm.request import Timings, Usage
from vlm.extras import require


class Traces(Protocol):
    def request(
        self, request_id: str, headers: Mapping[str, str], usage: Usage | None, timings: Timings | None
    ) -> None:
        """A request that just ended, rebuilt from its timings."""
        ...


class NoTraces:
    def request(
        self, request_id: str, headers: Mapping[str, str], usage: Usage | None, timings: Timings | None
    ) -> None:
        return


class OpenTelemetryTraces:
    """Uses whatever tracer provider the process has set up (`opentelemetry-instrument`, for one)."""

    def __init__(self) -> None:
        require("trace", "the setting traces", "opentelemetry")
        from opentelemetry import propagate, trace

        self._extract = propagate.extract
        self._set_span = trace.set_span_in_context
        self._tracer = trace.get_tracer("vlm")

    def request(
        self, request_id: str, headers: Mapping[str, str], usage: Usage | None, timings: Timings | None
    ) -> None:
        if timings is None:
            return
        end = time.time_ns()
        start = end - int(timings.total_ms * 1e6)
        attributes: dict[str, Any] = {"request.id": request_id}
        if usage:
            attributes |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "vlm.usage.image_tokens": usage.image_tokens,
                "vlm.usage.cached_tokens": usage.cached_tokens,
            }
        root = self._tracer.start_span(
            "chat", context=self._extract(dict(headers)), start_time=start, attributes=attributes
        )
        context = self._set_span(root)
        decode_ms = max(0.0, timings.total_ms - timings.ttft_ms)
        at = start
        for name, ms in (
            ("preprocess", timings.preprocess_ms),
            ("queue", timings.queue_ms),
            ("encode", timings.encode_ms),
            ("prefill", timings.prefill_ms),
            ("decode", decode_ms),
        ):
            stage = self._tracer.start_span(name, context=context, start_time=at)
            at += int(ms * 1e6)
            stage.end(end_time=at)
        root.end(end_time=end)


def make_traces(enabled: bool) -> Traces:
    """Raises ConfigError when traces are wanted and the package is missing."""
    return OpenTelemetryTraces() if enabled else NoTraces()
