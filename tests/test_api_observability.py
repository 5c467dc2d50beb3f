"""Metrics under the names that others use, logs that can be joined, spans over the stages."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine_client import LiveServer, ask, live_server, png

from llm.request import Timings, Usage
from vlm.api.observe.logs import JsonFormatter, PlainFormatter, formatter, request_id
from vlm.api.observe.metrics import EngineCollector
from vlm.api.observe.stage_rates import StageRates
from vlm.api.observe.tracing import NoTraces, OpenTelemetryTraces, make_traces
from vlm.config import ServeConfig

CHAT = "/v1/chat/completions"
NAMES = (
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "visual_cache_queries_total",
    "visual_cache_hits_total",
    "request_success_total",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_metrics_bear_the_names_that_others_use(server: LiveServer) -> None:
    """users.md, benchmark conventions."""
    with server.client() as http:
        http.post(CHAT, json=ask(png(), "Hi"))
        text = http.get("/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {f"vlm_{name}" for name in NAMES} <= names
    assert 'vlm_request_success_total{finish_reason="stop"}' in text


def test_routers_find_vllms_names_with_the_same_values() -> None:
    collector = EngineCollector()
    collector.stats = {"engine": {"running": 3, "waiting": 2, "kv_blocks": 8, "kv_blocks_held": 6}}
    values = {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}
    assert values["vllm:num_requests_running"] == 3 and values["vllm:num_requests_waiting"] == 2
    assert values["vllm:kv_cache_usage_perc"] == values["vlm_kv_cache_usage_ratio"] == 0.75


def test_labels_come_from_routes_and_not_from_clients(server: LiveServer) -> None:
    """A client that makes up paths and methods can't make up time series."""
    with server.client() as http:
        for i in range(5):
            http.get(f"/made/up/{i}")
            http.request(f"METHOD{i}", "/v1/models")
            http.get(f"/v1/files/file-{i:032x}")
        text = http.get("/metrics").text
    assert "made/up" not in text and "METHOD" not in text and "file-0" not in text
    assert 'route="/v1/files/{file_id}"' in text and 'route="unmatched"' in text


def test_refusals_are_counted_by_code(server: LiveServer) -> None:
    with server.client() as http:
        http.post(CHAT, json=ask(b"junk", "Hi"))
        assert 'vlm_request_errors_total{code="unsupported_image_format"}' in http.get("/metrics").text


def record(**extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("vlm.api", logging.INFO, "f", 1, "request", None, None)
    vars(made).update(extra)
    return made


def test_json_logs_are_one_object_a_line_with_the_request_id() -> None:
    token = request_id.set("req-1")
    try:
        line = JsonFormatter().format(record(status=200, ms=1.5))
        plain = PlainFormatter().format(record(status=200))
    finally:
        request_id.reset(token)
    value = json.loads(line)
    assert "\n" not in line and value["request_id"] == "req-1"
    assert (value["message"], value["status"], value["level"]) == ("request", 200, "info")
    assert "request_id=req-1" in plain and "status=200" in plain


def test_logs_are_plain_on_a_terminal_and_json_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, kind in ((True, PlainFormatter), (False, JsonFormatter)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        assert type(formatter("auto")) is kind
        assert (type(formatter("plain")), type(formatter("json"))) == (PlainFormatter, JsonFormatter)


def test_every_request_is_logged_with_its_route_and_status(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vlm.api"), server.client() as http:
        http.get("/v1/models", headers={"x-request-id": "mine"})
        end = time.monotonic() + 20  # the line is written once the answer is out
        while not (logged := [vars(r) for r in caplog.records if r.name == "vlm.api"]):
            assert time.monotonic() < end, "nothing was logged"
            time.sleep(0.005)
    assert any(r["route"] == "/v1/models" and r["status"] == 200 and r["ms"] >= 0 for r in logged)


class Span:
    def __init__(self, name: str, start: int, attributes: dict[str, Any] | None) -> None:
        self.name, self.start, self.attributes, self.end_time = name, start, attributes or {}, 0

    def end(self, end_time: int) -> None:
        self.end_time = end_time


def test_spans_cover_the_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry", reason="traces are an option that needs opentelemetry-api")
    spans: list[Span] = []

    class Tracer:
        def start_span(
            self, name: str, context: Any = None, start_time: int = 0, attributes: Any = None
        ) -> Span:
            spans.append(Span(name, start_time, attributes))
            return spans[-1]

    traces = make_traces(True)
    assert isinstance(traces, OpenTelemetryTraces)
    monkeypatch.setattr(traces, "_tracer", Tracer())
    monkeypatch.setattr(traces, "_set_span", lambda span: None)
    timings = Timings(1.0, 2.0, 3.0, 4.0, ttft_ms=10.0, tpot_ms=1.0, total_ms=30.0)
    traces.request("id", {}, Usage(10, 4, 2, 5), timings)
    root, *stages = spans
    assert [span.name for span in stages] == ["preprocess", "queue", "encode", "prefill", "decode"]
    assert root.attributes["vlm.usage.cached_tokens"] == 2
    assert root.end_time - root.start == pytest.approx(30e6, abs=2)
    assert stages[0].start == root.start and stages[-1].end_time == pytest.approx(root.end_time, abs=10)
    assert all(a.end_time == b.start for a, b in itertools.pairwise(stages))


def test_without_the_option_there_are_no_traces() -> None:
    assert isinstance(make_traces(ServeConfig().traces), NoTraces)


def test_rates_learn_from_measured_stages_only() -> None:
    rates = StageRates()
    assert rates.expected_ttft_ms(1.0, 1, 100) is None
    rates.prefill_ms_per_token.add(0.5)
    rates.queue_ms.add(2.0)
    assert rates.expected_ttft_ms(0.0, 0, 100) == pytest.approx(52.0)
    assert rates.expected_ttft_ms(1.0, 4, 100) is None
    rates.preprocess_ms_per_megapixel.add(30.0)
    rates.encode_ms_per_row.add(5.0)
    assert rates.expected_ttft_ms(2.0, 4, 100) == pytest.approx(132.0)
