"""Requests and events as JSON values, and the frames that carry them between processes.

A frame is a JSON header and an optional run of raw bytes (tiles): no pickle, sizes checked first.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, fields
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

FRAME_HEADER = struct.Struct("!II")  # bytes of JSON, bytes of payload
MAX_JSON_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30

_EVENTS: dict[str, type] = {
    cls.__name__: cls for cls in (WantVisual, Delta, Finished, Failed, PromptLogprobs)
}


def pack_frame(header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The parts to write, in order."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return [FRAME_HEADER.pack(len(text), len(payload)) + text, payload]


def frame_sizes(header: bytes) -> tuple[int, int]:
    """(JSON bytes, payload bytes) of a frame. Raises ValueError when a cap is exceeded."""
    json_bytes, payload_bytes = FRAME_HEADER.unpack(header)
    if json_bytes > MAX_JSON_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError("frame larger than its cap")
    return json_bytes, payload_bytes


def request_to_json(request: Request) -> dict[str, Any]:
    prompt = request.prompt
    return {
        "id": request.id,
        "token_ids": list(prompt.token_ids),
        "spans": [[s.start, s.length, s.key, s.offset] for s in prompt.spans],
        "params": asdict(request.params),
        "priority": request.priority,
        "namespace": request.namespace,
    }


def request_from_json(value: dict[str, Any]) -> Request:
    params = dict(value["params"])
    unknown = params.keys() - {f.name for f in fields(SamplingParams)}
    if unknown:
        raise ValueError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
    params["logit_bias"] = tuple((int(t), float(b)) for t, b in params.get("logit_bias", ()))
    params["stop"] = tuple(params.get("stop", ()))
    if params.get("constraint") is not None:
        kind, text = params["constraint"]
        params["constraint"] = (kind, text)
    spans = tuple(ImageSpan(start, n, VisualKey(key), offset) for start, n, key, offset in value["spans"])
    return Request(
        id=value["id"],
        prompt=Prompt(tuple(value["token_ids"]), spans),
        params=SamplingParams(**params),
        priority=value["priority"],
        namespace=value["namespace"],
    )


def event_to_json(event: Event) -> dict[str, Any]:
    return {"type": type(event).__name__, **asdict(event)}


def event_from_json(value: dict[str, Any]) -> Event:
    value = dict(value)
    cls = _EVENTS[value.pop("type")]
    if "logprobs" in value:
        value["logprobs"] = tuple(
            TokenLogprob(p["token_id"], p["logprob"], tuple((t, v) for t, v in p["top"]))
            for p in value["logprobs"]
        )
    if cls is Delta:
        value["token_ids"] = tuple(value["token_ids"])
    elif cls is Finished:
        value["usage"] = None if value["usage"] is None else Usage(**value["usage"])
        value["timings"] = None if value["timings"] is None else Timings(**value["timings"])
    event: Event = cls(**value)
    return event
