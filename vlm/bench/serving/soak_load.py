"""Every kind of request that a service meets, drawn at random, from clients that ask without a pause."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
from PIL import Image

CHAT = "/v1/chat/completions"
WORDS = ("red", "green", "invoice", "total", "date", "seller", "circle", "square", "number", "name", "page")
SIDES = (96, 200, 400, 640, 1000)  # pixels; a tile of the default model is smaller than the third


class SoakLoad:
    """Draws requests of all kinds; no two of the same text, few of the same image."""

    def __init__(self, http: httpx.AsyncClient, seed: int = 0) -> None:
        self._http = http
        self._draw = random.Random(seed)
        self._noise = np.random.default_rng(seed)
        self._known = [self._image() for _ in range(8)]
        self._number = 0
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # answers other than 200, by status

    async def run(self, clients: int, seconds: float) -> None:
        """Each client asks again as soon as it has its answer."""
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                await self._one()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self) -> None:
        kinds: dict[str, tuple[int, Callable[[], Awaitable[object]]]] = {
            "text": (4, lambda: self._ask(self._text())),
            "sampled": (3, lambda: self._ask(self._text(), **self._sampling())),
            "choices": (2, lambda: self._ask(self._text(), n=4, temperature=1.0)),
            "beams": (2, lambda: self._ask(self._text(), beam_width=4)),
            "new image": (3, lambda: self._ask(self._about(self._image()))),
            "known image": (3, lambda: self._ask(self._about(self._draw.choice(self._known)))),
            "regex": (2, lambda: self._ask(self._text(), response_format=self._regex())),
            "schema": (2, lambda: self._ask(self._text(), response_format=self._schema())),
            "stream": (3, lambda: self._stream(leave_after=None)),
            "leaver": (2, lambda: self._stream(leave_after=self._draw.randint(1, 8))),
            "file": (1, self._file),
        }
        names = list(kinds)
        kind = self._draw.choices(names, [kinds[name][0] for name in names])[0]
        await kinds[kind][1]()
        self.done[kind] += 1

    def _text(self) -> str:
        self._number += 1
        return f"{self._number}: " + " ".join(self._draw.choices(WORDS, k=self._draw.randint(3, 60)))

    def _image(self) -> str:
        """A data: URI of noise, as no codec shrinks it."""
        width, height = self._draw.choice(SIDES), self._draw.choice(SIDES)
        pixels = self._noise.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((width, height)).save(buffer, "JPEG")
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()

    def _about(self, url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": self._text()}]

    def _sampling(self) -> dict[str, Any]:
        draw = self._draw
        return {
            "temperature": draw.uniform(0.1, 2),
            "top_p": draw.uniform(0.1, 1),
            "repetition_penalty": draw.uniform(0.8, 1.5),
            "presence_penalty": draw.uniform(-1, 1),
            "logprobs": True,
            "top_logprobs": 5,
            "stop": ["\n\n", draw.choice(WORDS)],
        }

    def _regex(self) -> dict[str, Any]:
        pattern = f"({'|'.join(self._draw.sample(WORDS, 4))}) [0-9]{{{self._draw.randint(1, 9)}}}"
        return {"type": "regex", "regex": pattern}

    def _schema(self) -> dict[str, Any]:
        names = self._draw.sample(WORDS, 2)
        properties = {names[0]: {"type": "string", "maxLength": 12}, names[1]: {"enum": [1, 2, self._number]}}
        schema = {"type": "object", "properties": properties, "required": names}
        return {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema}}

    def _body(self, content: object, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._draw.randint(1, 40),
            "ignore_eos": True,
            "service_tier": self._draw.choice(["default", "default", "flex"]),
            **settings,
        }

    async def _ask(self, content: object, **settings: Any) -> None:
        answer = await self._http.post(CHAT, json=self._body(content, settings))
        self._note(answer)

    async def _stream(self, leave_after: int | None) -> None:
        """Reads a stream to its end, or leaves it after so many of its lines."""
        body = self._body(self._text(), {"stream": True, "max_tokens": 60})
        async with self._http.stream("POST", CHAT, json=body) as answer:
            self._note(answer)
            left = leave_after
            async for _ in answer.aiter_lines():
                if left is not None and (left := left - 1) < 0:
                    return

    async def _file(self) -> None:
        line = json.dumps({"text": self._text()}).encode() + b"\n"
        lines = line * self._draw.randint(1, 2000)
        form = {"purpose": "batch"}
        stored = await self._http.post("/v1/files", files={"file": ("soak.jsonl", lines)}, data=form)
        self._note(stored)
        if stored.status_code == 200:
            self._note(await self._http.delete(f"/v1/files/{stored.json()['id']}"))

    def _note(self, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.refused[str(answer.status_code)] += 1
