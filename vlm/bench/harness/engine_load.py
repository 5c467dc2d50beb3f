"""Workloads for the engine benchmarks, and a driver that steps a runner and stamps every token."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from llm.request import Delta, Failed, Finished, Prompt, Request, SamplingParams, Usage, VisualKey, WantVisual
from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import preprocess
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec
from vlm.train.drawing.documents import make_document
from workers.local.engine_runner import EngineRunner


@dataclass
class Trace:
    """One request's life: submission and token times on time.perf_counter()."""

    submitted: float
    token_times: list[float] = field(default_factory=list)
    cpu_times: list[float] = field(default_factory=list)  # of this process, at the same moments
    token_ids: list[int] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.token_times)

    @property
    def cpu_gaps_s(self) -> list[float]:
        """What the machine's other processes take away is not in here."""
        return gaps(self.cpu_times)


def gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


@dataclass(frozen=True)
class ImageRequest:
    request: Request
    images: dict[VisualKey, bytes]


class Driver:
    """Steps a runner until its requests end; decodes and tiles what the engine asks for."""

    def __init__(self, spec: ModelSpec, runner: EngineRunner) -> None:
        self.spec = spec
        self.runner = runner
        self.traces: dict[str, Trace] = {}
        self._images: dict[VisualKey, bytes] = {}

    def submit(self, request: Request, images: dict[VisualKey, bytes] | None = None) -> None:
        self._images.update(images or {})
        self.traces[request.id] = Trace(time.perf_counter())
        self.runner.submit(request)

    def run(self, between: Callable[[int], None] | None = None) -> None:
        """`between(step)` is called after every step and may submit more."""
        step = 0
        while self.runner.has_work:
            self._take()
            step += 1
            if between:
                between(step)

    def _take(self) -> None:
        events = self.runner.step()
        now, cpu = time.perf_counter(), time.process_time()
        for event in events:
            match event:
                case WantVisual(key=key):
                    tiles = preprocess(self._images[key], self.spec.preprocess_spec("auto"), ImageLimits())
                    self.runner.put_tiles(key, tiles)
                case Delta(request_id=name, token_ids=ids):
                    self.traces[name].token_ids.extend(ids)
                    self.traces[name].token_times.extend([now] * len(ids))
                    self.traces[name].cpu_times.extend([cpu] * len(ids))
                case Finished(request_id=name, usage=usage):
                    self.traces[name].usage = usage or self.traces[name].usage
                case Failed(message=message):
                    raise RuntimeError(message)


def document(seed: int, kind: str = "shapes") -> bytes:
    buffer = io.BytesIO()
    make_document(kind, 10**9 + seed, 1.0)[0].save(buffer, "PNG")
    return buffer.getvalue()


def image_request(
    spec: ModelSpec, name: str, images: Sequence[bytes], question: str, params: SamplingParams
) -> ImageRequest:
    how = spec.preprocess_spec("auto")
    parts, needed = [], {}
    for data in images:
        info = probe(data, ImageLimits())
        key = spec.visual_key(info.sha256, how)
        parts.append(ImagePart(how.rule.grid(info.width, info.height, "auto"), key))
        needed[key] = data
    prompt = spec.prompt_builder.build([Message("user", (*parts, question))])
    return ImageRequest(Request(name, prompt, params), needed)


def scheduled_requests(spec: ModelSpec, count: int, seed: int = 0) -> list[Request]:
    """`schedule.json` repeated to `count` requests: random prompts, exact output lengths.

    A prompt longer than the model's context beside its output is cut to fit; slot use does not depend on it.
    """
    entries = json.loads((Path(__file__).parent / "schedule.json").read_text())["requests"]
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        entry = entries[number % len(entries)]
        length = min(entry["prompt"], spec.context_length - entry["output"])
        ids = tuple(draw.randrange(spec.decoder.vocab_size) for _ in range(length))
        params = SamplingParams(max_tokens=entry["output"], ignore_eos=True)
        requests.append(Request(f"s{number}", Prompt(ids), params))
    return requests


def tiled_photo(seed: int = 0) -> bytes:
    """A PNG of 1024 x 768 pixels of noise: 13 tiles of SmolVLM's."""
    pixels = np.random.default_rng(seed).integers(0, 256, (768, 1024, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
