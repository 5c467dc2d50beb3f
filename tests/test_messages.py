"""What crosses a process border comes out as it went in."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.request import (
    Delta,
    Failed,
    Finished,
    ImageSpan,
    Prompt,
    PromptLogprobs,
    Request,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
    VisualKey,
    WantVisual,
)
from workers.contract.messages import (
    FRAME_HEADER,
    MAX_JSON_BYTES,
    event_from_json,
    event_to_json,
    frame_sizes,
    pack_frame,
    request_from_json,
    request_to_json,
)
from workers.contract.versions import FIRST_VERSION, MESSAGE_VERSION, version_of

counts = st.integers(0, 10**6)
reals = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(min_size=1, max_size=20)
logprobs = st.builds(TokenLogprob, counts, reals, st.lists(st.tuples(counts, reals), max_size=3).map(tuple))
events = st.one_of(
    st.builds(WantVisual, names, names.map(VisualKey)),
    st.builds(
        Delta,
        names,
        counts,
        st.lists(counts, max_size=3).map(tuple),
        st.text(),
        st.lists(logprobs).map(tuple),
    ),
    st.builds(
        Finished,
        names,
        counts,
        st.sampled_from(["stop", "length"]),
        st.none() | st.builds(Usage, counts, counts, counts, counts),
        st.none() | st.builds(Timings, reals, reals, reals, reals, reals, reals, reals),
    ),
    st.builds(Failed, names, names, st.text(), st.none() | names),
    st.builds(PromptLogprobs, names, st.lists(logprobs).map(tuple)),
)
params = st.builds(
    SamplingParams,
    max_tokens=counts,
    temperature=reals,
    logit_bias=st.lists(st.tuples(counts, reals), max_size=3).map(tuple),
    seed=st.none() | counts,
    stop=st.lists(names, max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    constraint=st.none() | st.tuples(st.sampled_from(["regex", "json_schema"]), st.text()),
)
shapes = st.none() | st.tuples(counts, counts)
spans = st.builds(ImageSpan, counts, counts, names.map(VisualKey), counts, shapes)
requests = st.builds(
    Request,
    names,
    st.builds(Prompt, st.lists(counts).map(tuple), st.lists(spans, max_size=3).map(tuple)),
    params,
    st.sampled_from(["interactive", "batch"]),
    names,
)


@given(events)
def test_an_event_survives_the_wire(event: object) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@given(requests)
def test_a_request_survives_the_wire(request: Request) -> None:
    assert request_from_json(json.loads(json.dumps(request_to_json(request)))) == request


unknown = st.dictionaries(names.map("x-".__add__), st.none() | counts | names, max_size=2)


@given(events, unknown)
def test_what_a_newer_writer_adds_to_an_event_is_dropped(event: object, more: dict[str, Any]) -> None:
    value = json.loads(json.dumps(event_to_json(event)))  # type: ignore[arg-type]
    for part in (value, value.get("usage"), value.get("timings"), *value.get("logprobs", ())):
        if part is not None:
            part.update(more)
    assert event_from_json(value) == event


@given(requests, unknown)
def test_what_a_newer_writer_adds_to_a_request_is_dropped(request: Request, more: dict[str, Any]) -> None:
    value = json.loads(json.dumps(request_to_json(request)))
    value.update(more)
    value["params"].update(more)
    value["spans"] = [[*span, *more.values()] for span in value["spans"]]
    assert request_from_json(value) == request


@given(requests)
def test_a_request_of_the_first_version_is_read(request: Request) -> None:
    """It named no version."""
    value = json.loads(json.dumps(request_to_json(request)))
    assert version_of(value) == MESSAGE_VERSION
    del value["version"]
    assert version_of(value) == FIRST_VERSION and request_from_json(value) == request


def test_dropped_fields_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    value = request_to_json(Request("r", Prompt((1,))))
    value["params"]["temprature"] = 1
    for _ in range(3):
        assert request_from_json(value).params == SamplingParams()
    assert [record.getMessage().count("SamplingParams.temprature") for record in caplog.records] == [1]


def test_an_event_of_a_kind_to_come_is_dropped() -> None:
    assert event_from_json({"type": "Thought", "request_id": "r", "text": "hm"}) is None


values = st.recursive(
    st.none() | counts | names, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=8
)


@given(events | requests, st.data())
def test_what_cannot_be_read_is_a_value_error_and_nothing_else(message: object, data: st.DataObject) -> None:
    is_request = isinstance(message, Request)
    value = request_to_json(message) if is_request else event_to_json(message)  # type: ignore[arg-type]
    field = data.draw(st.sampled_from(sorted(value)))
    if data.draw(st.booleans()):
        del value[field]
    else:
        value[field] = data.draw(values)
    with contextlib.suppress(ValueError):
        request_from_json(value) if is_request else event_from_json(value)


def test_a_frame_larger_than_its_cap_is_refused_before_it_is_read() -> None:
    head, payload = pack_frame({"op": "x"}, b"abc")
    assert frame_sizes(bytes(head[: FRAME_HEADER.size])) == (len(head) - FRAME_HEADER.size, len(payload))
    with pytest.raises(ValueError, match="cap"):
        frame_sizes(FRAME_HEADER.pack(MAX_JSON_BYTES + 1, 0))
