"""The requests that load is made of: documents of several sizes, questions about each, Poisson arrivals.

Images come from a pool, so that four in five requests are about an image that was asked about before.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any, overload

from PIL import Image

from vlm.bench.harness.engine_load import document
from vlm.bench.harness.load_client import Sample

SLO_TTFT_MS = 1000.0
SLO_TPOT_MS = 100.0
REUSE = 5  # requests per image of the pool
QUESTIONS = ("What is in the image?", "How many shapes are there?", "Describe the image.")
SIZES = ((128, 128), (640, 480), (1280, 960), (2000, 1500))
MAX_TOKENS = 32


def is_good(sample: Sample) -> bool:
    """Whether it met both objectives."""
    answered = sample.completed and bool(sample.token_times)
    return answered and sample.ttft_ms <= SLO_TTFT_MS and sample.tpot_ms <= SLO_TPOT_MS


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else float("nan")


def picture(seed: int, width: int, height: int) -> bytes:
    """A document of the model's domain at this size, as JPEG."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(document(seed))) as image:
        image.convert("RGB").resize((width, height)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def chat_body(data: bytes, question: str, **settings: Any) -> bytes:
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": MAX_TOKENS}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**body, **stream, **settings}).encode()


def workload(num_images: int, first_seed: int) -> list[bytes]:
    """Bodies: image i with question q at index i * len(QUESTIONS) + q; sizes are mixed."""
    pictures = [picture(first_seed + i, *SIZES[i % len(SIZES)]) for i in range(num_images)]
    return [chat_body(data, question) for data in pictures for question in QUESTIONS]


def poisson(count: int, rate: float, num_images: int, seed: int = 0) -> list[tuple[float, int]]:
    """Arrivals of a pool of images, each `REUSE` times, in random order."""
    draw = random.Random(seed)
    times = itertools.accumulate(draw.expovariate(rate) for _ in range(count))
    images = [i % num_images for i in range(count)]
    draw.shuffle(images)
    return [
        (at, image * len(QUESTIONS) + draw.randrange(len(QUESTIONS)))
        for at, image in zip(times, images, strict=True)
    ]


class FreshMix(Sequence[bytes]):
    """Bodies as of `workload`, of images that no server has seen under this `stamp`: each carries a comment
    of its own, so that one drawing serves as many images. Made when asked for."""

    def __init__(self, pictures: Sequence[bytes], stamp: str) -> None:
        self._pictures = pictures
        self._stamp = stamp

    def __len__(self) -> int:
        return 1 << 30

    @overload
    def __getitem__(self, key: int) -> bytes: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[bytes]: ...
    def __getitem__(self, key: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(key, slice):
            raise TypeError("a fresh mix is asked for one body at a time")
        image, question = divmod(key, len(QUESTIONS))
        data = self._pictures[image % len(self._pictures)]
        return chat_body(stamped(data, f"{self._stamp}:{image}"), QUESTIONS[question])


def stamped(jpeg: bytes, text: str) -> bytes:
    """The same picture with a comment behind its first marker."""
    comment = text.encode()
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]
