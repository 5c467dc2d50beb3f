"""Requests and events as JSON values, and the frames that carry them between processes.

A frame is a JSON header and an optional run of raw bytes (tiles): no pickle, sizes checked first.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from typing import Any

from llm.request import (
    Delta,
    Event,
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
from workers.contract.versions import FIRST_VERSION, MESSAGE_VERSION, known_fields, note_dropped

FRAME_HEADER = struct.Struct("!II")  # bytes of JSON, bytes of payload
MAX_JSON_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30

_REQUEST_FIELDS = {"version", "id", "token_ids", "spans", "text", "params", "priority", "namespace"}
# The first version refuses a request with a parameter that it does not know, or with more of a span.
_FIRST_PARAMS = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "beam_width", "stop",
    "ignore_eos", "logprobs", "prompt_logprobs", "constraint",
}  # fmt: skip
_EVENTS: dict[str, type] = {
    cls.__name__: cls for cls in (WantVisual, Delta, Finished, Failed, PromptLogprobs)
}


def pack_frame(header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The parts to write, in order."""
    header = {"version": MESSAGE_VERSION, **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return [FRAME_HEADER.pack(len(text), len(payload)) + text, payload]


def frame_sizes(header: bytes) -> tuple[int, int]:
    """(JSON bytes, payload bytes) of a frame. Raises ValueError when a cap is exceeded."""
    json_bytes, payload_bytes = FRAME_HEADER.unpack(header)
    if json_bytes > MAX_JSON_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError("frame larger than its cap")
    return json_bytes, payload_bytes


def request_to_json(request: Request, reader_version: int = MESSAGE_VERSION) -> dict[str, Any]:
    """A reader of the first version gets what it knows, and answers as it always did."""
    prompt, params = request.prompt, asdict(request.params)
    spans = [[s.start, s.length, s.key, s.offset, s.shape] for s in prompt.spans]
    if reader_version == FIRST_VERSION:
        params = {name: value for name, value in params.items() if name in _FIRST_PARAMS}
        spans = [span[:4] for span in spans]
    return {
        "version": MESSAGE_VERSION,
        "id": request.id,
        "token_ids": list(prompt.token_ids),
        "spans": spans,
        **({} if prompt.text is None else {"text": prompt.text}),
        "params": params,
        "priority": request.priority,
        "namespace": request.namespace,
    }


def request_from_json(value: dict[str, Any]) -> Request:
    """Raises ValueError for what can't be read."""
    try:
        return _request(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a request: {error!r}") from None


def _request(value: dict[str, Any]) -> Request:
    for name in value.keys() - _REQUEST_FIELDS:
        note_dropped("field", f"Request.{name}")
    params = known_fields(SamplingParams, value["params"])
    params["logit_bias"] = tuple((int(t), float(b)) for t, b in params.get("logit_bias", ()))
    for name in ("stop", "stop_token_ids"):
        params[name] = tuple(params.get(name, ()))
    if params.get("constraint") is not None:
        kind, text = params["constraint"]
        params["constraint"] = (kind, text)
    return Request(
        id=value["id"],
        prompt=Prompt(
            tuple(value["token_ids"]), tuple(_span(*span) for span in value["spans"]), value.get("text")
        ),
        params=SamplingParams(**params),
        priority=value.get("priority", "interactive"),
        namespace=value["namespace"],
    )


def _span(
    start: int, length: int, key: str, offset: int, shape: list[int] | None = None, *_: object
) -> ImageSpan:
    if shape is None:
        return ImageSpan(start, length, VisualKey(key), offset)
    rows, cols = shape
    return ImageSpan(start, length, VisualKey(key), offset, (rows, cols))


def event_to_json(event: Event) -> dict[str, Any]:
    return {"type": type(event).__name__, **asdict(event)}


def event_from_json(value: dict[str, Any]) -> Event | None:
    """None for a kind of event that is not known. Raises ValueError for what can't be read."""
    try:
        return _event(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {error!r}") from None


def _event(value: dict[str, Any]) -> Event | None:
    value = dict(value)
    name = value.pop("type")
    cls = _EVENTS.get(name)
    if cls is None:
        note_dropped("kind of event", name)
        return None
    value = known_fields(cls, value)
    if "logprobs" in value:
        value["logprobs"] = tuple(
            TokenLogprob(p["token_id"], p["logprob"], tuple((t, v) for t, v in p["top"]))
            for p in value["logprobs"]
        )
    if cls is Delta:
        value["token_ids"] = tuple(value["token_ids"])
    elif cls is Finished:
        for field, kind in (("usage", Usage), ("timings", Timings)):
            if value.get(field) is not None:
                value[field] = kind(**known_fields(kind, value[field]))
    event: Event = cls(**value)
    return event
