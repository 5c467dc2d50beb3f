"""Prometheus metrics, named as other servers of this kind name theirs, with our prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llm.request import Timings, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300)
_TOKEN_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

# (section, key) of the engine's own statistics -> metric, its kind, its help.
_ENGINE: dict[tuple[str, str], tuple[str, type[Metric], str]] = {
    ("visual_cache", "queries"): ("vlm_visual_cache_queries", CounterMetricFamily, "Images looked up"),
    ("visual_cache", "hits"): ("vlm_visual_cache_hits", CounterMetricFamily, "Images found"),
    ("visual_cache", "evictions"): ("vlm_visual_cache_evictions", CounterMetricFamily, "Images evicted"),
    ("visual_cache", "bytes"): ("vlm_visual_cache_bytes", GaugeMetricFamily, "Visual tokens held"),
    ("engine", "running"): (
        "vlm_num_sequences_running",
        GaugeMetricFamily,
        "Sequences in the engine's batch",
    ),
    ("engine", "failed_steps"): ("vlm_failed_steps", CounterMetricFamily, "Steps that failed"),
    ("engine", "preempted_recompute"): (
        "vlm_preemptions",
        CounterMetricFamily,
        "Sequences put back for want of KV",
    ),
    ("engine", "steps"): ("vlm_engine_steps", CounterMetricFamily, "Steps of the engine"),
    ("engine", "kv_saved_read"): (
        "vlm_kv_disk_blocks_read",
        CounterMetricFamily,
        "KV blocks that were read from disk and not computed",
    ),
    ("engine", "kv_saved_written"): (
        "vlm_kv_disk_blocks_written",
        CounterMetricFamily,
        "KV blocks handed to the disk",
    ),
    ("disk", "bytes"): ("vlm_kv_disk_bytes", GaugeMetricFamily, "KV blocks and visual tokens on disk"),
    ("encoder", "tiles"): ("vlm_encoded_tiles", CounterMetricFamily, "Tiles encoded"),
}


# key of a queue's statistics -> metric, its help.
_QUEUES = {
    "length": ("vlm_queue_length", "Messages that wait in the queue"),
    "oldest_age_s": ("vlm_queue_oldest_age_seconds", "Age of the oldest of them"),
    "wait_ms": ("vlm_queue_wait_milliseconds", "Mean time from sent to taken, weighted to the latest"),
}


class EngineCollector:
    """The engine's figures as of its last answer."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Mapping[str, Any]] = {}

    def collect(self) -> Iterator[Metric]:
        for (section, key), (name, family, text) in _ENGINE.items():
            value = self.stats.get(section, {}).get(key)
            if isinstance(value, int | float):
                yield family(name, text, value=float(value))  # type: ignore[call-arg]
        yield from self._queues()
        engine = self.stats.get("engine", {})
        if engine.get("kv_blocks"):
            ratio = engine["kv_blocks_held"] / engine["kv_blocks"]
            yield GaugeMetricFamily("vlm_kv_cache_usage_ratio", "KV blocks held by requests", value=ratio)
            yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "The same, for routers", value=ratio)
        for key in ("running", "waiting"):
            if key in engine:
                name = f"vllm:num_requests_{key}"
                yield GaugeMetricFamily(
                    name, f"Sequences {key} in the engine, for routers", value=engine[key]
                )

    def _queues(self) -> Iterator[Metric]:
        """Of the broker, for an autoscaler; only where there is one."""
        for key, (name, text) in _QUEUES.items():
            family = GaugeMetricFamily(name, text, labels=["queue"])
            for queue, values in self.stats.get("queues", {}).items():
                if key in values:
                    family.add_metric([queue], float(values[key]))
            if family.samples:
                yield family


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.ttft = self._histogram("time_to_first_token_seconds", "Request read to first token", _LATENCY_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Gap between two tokens", _TOKEN_GAP_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Request read to last token", _LATENCY_S)
        self.queue = self._histogram("request_queue_time_seconds", "Submitted to first scheduled", _LATENCY_S)
        self.running = self._gauge("num_requests_running", "Requests whose answer has begun")
        self.waiting = self._gauge("num_requests_waiting", "Requests whose answer has not begun")
        self.decoded_bytes = self._gauge(
            "decoded_image_bytes_in_flight", "Admitted images before their answers"
        )
        self.body_bytes = self._gauge("request_body_bytes_in_flight", "Bodies of requests under way")
        self.engine_ready = self._gauge("engine_ready", "1 while the engine makes progress")
        self.success = self._counter("request_success", "Answered choices", "finish_reason")
        self.errors = self._counter("request_errors", "Refused and failed requests", "code")
        self.http = self._counter("http_requests", "HTTP responses", "method", "route", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, images included")
        self.image_tokens = self._counter("image_tokens", "Visual tokens of prompts")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up, in tokens")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found, in tokens")
        self.caller_tokens = self._counter("caller_tokens", "Tokens of a key's requests", "caller", "kind")
        self.running.set(0)
        self.waiting.set(0)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vlm_{name}", text, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vlm_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vlm_{name}", text, labels, registry=self.registry)

    def answered(self, usage: Usage, timings: Timings | None) -> None:
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.image_tokens.inc(usage.image_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.prefix_queries.inc(usage.prompt_tokens)
        self.prefix_hits.inc(usage.cached_tokens)
        if timings:
            self.queue.observe(timings.queue_ms / 1e3)

    def spent(self, caller: str, usage: Usage) -> None:
        """By the name of a key, so that there are as many labels as keys; nothing for callers without one."""
        if caller:
            self.caller_tokens.labels(caller, "prompt").inc(usage.prompt_tokens)
            self.caller_tokens.labels(caller, "completion").inc(usage.completion_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def described() -> list[tuple[str, str, str]]:
    """(name, kind, help) of every metric, those of engine and queues included."""
    own = [(metric.name, metric.type, metric.documentation) for metric in Metrics().registry.collect()]
    kinds = {CounterMetricFamily: "counter", GaugeMetricFamily: "gauge"}
    engine = [(name, kinds[family], text) for name, family, text in _ENGINE.values()]
    queues = [
        (name, "gauge", f"{text}; by queue, where there is a broker") for name, text in _QUEUES.values()
    ]
    ratio = [
        ("vlm_kv_cache_usage_ratio", "gauge", "KV blocks held by requests"),
        ("vllm:kv_cache_usage_perc", "gauge", "The same, for routers"),
        ("vllm:num_requests_running", "gauge", "Sequences running in the engine, for routers"),
        ("vllm:num_requests_waiting", "gauge", "Sequences waiting in the engine, for routers"),
    ]
    found = dict.fromkeys([*own, *engine, *ratio, *queues])
    return sorted((f"{name}_total" if kind == "counter" else name, kind, text) for name, kind, text in found)
